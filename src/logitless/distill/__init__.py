"""A student beside its teacher: divergences of their distributions without either's logits."""

from logitless.distill.teacher import Teacher, Teachers

__all__ = ["Teacher", "Teachers"]
