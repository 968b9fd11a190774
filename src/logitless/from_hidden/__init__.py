"""Log-probs from hidden states and the head's weight, without ever having logits."""
