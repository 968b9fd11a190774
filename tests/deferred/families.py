"""Every causal language model of Transformers, and many of images and text, so small that each is built at once.

    config class of a family  ->  its own parameters, where ``SIZES`` has them  ->  a model of two layers

A family whose config wants something else says so in ``OWN``; one that cannot be built here says why in ``NOT_BUILT``.
:func:`check` compares a family with itself after ``defer``. ``make families`` does so for all and writes the record.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from close import assert_close_to_truth, assert_gradient_close_to_truth
from torch import Tensor

import logitless as ll

ROOT = Path(__file__).parents[2]
VOCAB, HEADS = 97, 4

_WIDTHS = {
    32: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim dim embed_dim lru_width out_hidden_size "
    "projection_dim",
    48: "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size intermediate_size_mlp "
    "dff feed_forward_size block_ff_dim ff_dim inner_dim mlp_hidden_size",
    2: "depth num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_blocks num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_k moe_topk "
    "top_k_experts index_n_heads linear_num_key_heads linear_num_value_heads mamba_expand eos_token_id",
    HEADS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts num_local_experts n_routed_experts "
    "moe_num_experts qk_rope_head_dim index_topk mamba_d_conv conv_kernel time_step_rank mamba_dt_rank laurel_rank "
    "linear_conv_kernel_dim rotary_dim",
    8: "patch_size head_dim attention_head_dim kv_channels head_size d_kv global_head_dim qk_nope_head_dim v_head_dim "
    "index_head_dim mamba_d_state mamba_d_head mamba_n_heads state_size ssm_state_size mamba_num_heads mamba_head_dim "
    "mamba_chunk_size chunk_size n_mamba_heads linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input",
    16: "image_size num_position_embeddings "
    "moe_intermediate_size expert_dim shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "q_lora_rank kv_lora_rank attention_window_size sliding_window",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions mamba_d_ssm",
    1: "n_shared_experts n_group topk_group first_k_dense_replace moe_num_shared_experts n_groups mamba_n_groups "
    "bos_token_id decoder_start_token_id ep_size",
    0: "pad_token_id zero_expert_num num_kv_shared_layers",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
_DROPOUTS = (
    "attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout attention_probs_dropout_prob "
    "hidden_dropout_prob activation_dropout embedding_dropout classifier_dropout layerdrop decoder_layerdrop"
)
SIZES: dict[str, Any] = {name: size for size, names in _WIDTHS.items() for name in names.split()}
SIZES |= dict.fromkeys(_DROPOUTS.split(), 0.0)
SIZES |= {"is_decoder": True, "add_cross_attention": False, "adaptive": False, "initializer_range": 0.3}

OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_POSITIONS = {"rope_type": "default", "rope_theta": 1e4}
for _name in ("glm46v", "glm4v", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"):
    # Positions in time and space share the rotated half of a head.
    OWN[_name] = {"rope_parameters": _POSITIONS | {"mrope_section": [2, 1, 1]}}
OWN["glm4v_moe"] = {"rope_parameters": _POSITIONS | {"mrope_section": [2, 0, 0], "partial_rotary_factor": 0.5}}
"""What some families want besides, or instead."""

NOT_GENERATED = ("bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "xlstm")
NOT_GENERATED += ("lfm3", "recurrent_gemma", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text")
NOT_GENERATED += ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
"""Families whose ``generate`` fails at these sizes without ``defer``, too: two layers have no attention to cache."""

_COMPOSED = "not tried: a model of images and text, whose text model is a family of its own"
_LARGE = "not tried: its other parts are too large"
NOT_BUILT = {
    **dict.fromkeys(("dots3_note", "emu3", "gemma3n", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _COMPOSED),
    **dict.fromkeys(("blt", "gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal"), _LARGE),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "not tried: a model of sounds, whose config has three parts"),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "not tried: a draft, which reads another model"),
    **dict.fromkeys(("cohere_compass_text", "dbrx", "zamba"), "not tried: its config makes no model of two layers"),
    **dict.fromkeys(("prophetnet", "xglm"), "not tried: its masks overflow in float64"),
    "inkling2_text": "not tried: its router takes no float64",
    "reformer": "not tried: it wants hidden sizes and lengths of its own",
}
"""Families that were not tried, and why."""


WITH_IMAGES = """aria aya_vision cohere2_vision cosmos3_omni deepseek_vl exaone4_5 fuyu gemma3 gemma4 gemma4_unified
glm46v glm4v glm4v_moe glm_ocr got_ocr2 hyperclovax_vision_v2 idefics2 idefics3 internvl kosmos-2.5 lfm2_vl
lighton_ocr llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl
mistral3 mistral4 mistral_large4 mllama ovis2 paddleocr_vl paligemma pp_chart2table qianfan_ocr qwen2_5_vl qwen2_vl
qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp shieldgemma2 smolvlm step3p7 video_llama_3 video_llava
vipllava""".split()
"""Models of images and text that are small enough with a text alone."""


def known(images: bool = False) -> dict[str, str]:
    """The families of causal language models, or those of images and text, and the class of each."""
    from transformers.models.auto import modeling_auto

    if images:
        return {name: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in WITH_IMAGES}
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(family: str, images: bool) -> Any:
    """The config of a small model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    whole = kind()
    names = ("text_config", "vision_config", "audio_config") if images else ("text_config",)
    parts = {name: getattr(whole, name) for name in names if getattr(whole, name, None) is not None}
    if not parts:
        return _small(kind, family)
    return kind(**{name: _small(type(part), family).to_dict() for name, part in parts.items()})


def _small(kind: Any, family: str) -> Any:
    known = {*kind().to_dict(), *inspect.signature(kind.__init__).parameters}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "qk_rope_head_dim" in known:
        # Latent attention: a head is as wide as its two parts, and every head has keys of its own.
        sizes |= {"num_key_value_heads": HEADS}
        sizes.pop("head_dim", None)
    return kind(**sizes | {name: x for name, x in OWN.get(family, {}).items() if name in known})


def model_of(family: str, images: bool = False) -> Any:
    """A small model of a family, with biases that are not 0, in float32, for evaluation: nothing is dropped."""
    import transformers

    torch.manual_seed(3)
    model = getattr(transformers, known(images)[family])(config_of(family, images)).float().eval()
    if model._can_set_experts_implementation():
        # The faster ones do not multiply in float64.
        model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -0.1, 0.1)
    return model


IDS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(5))
LABELS = IDS.masked_fill(torch.arange(12) < 3, -100)


def by_labels(output: Callable[..., Any]) -> Tensor:
    """The loss that the model computes itself."""
    return output(labels=LABELS).loss


def by_idiom(output: Callable[..., Any]) -> Tensor:
    """Log-prob and entropy as users write them."""
    log_p = torch.log_softmax(output().logits[:, :-1] / 0.7, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, IDS[:, 1:, None]).mean() + 0.1 * entropy.mean()


def graded(model: Any, loss: Callable[[Callable[..., Any]], Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and the gradients of all parameters as one vector."""
    model.zero_grad()
    value = loss(lambda **more: model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **more))
    value.backward()
    return value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tokens(model: Any) -> Tensor:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False, pad_token_id=0)


def check(family: str, images: bool = False) -> None:
    """Raise unless loss, gradients and generated tokens are the same after ``defer``, with no logits computed."""
    with warnings.catch_warnings():
        # Models warn of what they are configured with.
        warnings.simplefilter("ignore")
        _check(family, images)


def _check(family: str, images: bool) -> None:
    model = model_of(family, images)
    truth, losses = copy.deepcopy(model).double(), (by_labels, by_idiom)
    wanted = [(graded(model, loss), graded(truth, loss)) for loss in losses]
    generated = None if family in NOT_GENERATED else tokens(model)
    # Strict: reading all of the logits is an error.
    with ll.defer(model, strict=True):
        for loss, (plain, exact) in zip(losses, wanted, strict=True):
            value, gradient = graded(model, loss)
            # Transformers' own loss is taken in float32, also of a float64 model.
            assert_close_to_truth(value, exact[0].double(), plain[0], loss.__name__)
            assert_gradient_close_to_truth(gradient, exact[1], plain[1], loss.__name__)
        if generated is not None:
            assert torch.equal(tokens(model), generated), "generate: other tokens"


def record(path: Path) -> None:
    """Check every family, and write what came of it, a line for each."""
    import transformers
    from tqdm import tqdm

    from benchmarks.bench.checkouts import commit

    found = []
    every = [(family, name, images) for images in (False, True) for family, name in known(images).items()]
    for family, name, images in tqdm(every, unit="family"):
        outcome = None if images else NOT_BUILT.get(family)
        if outcome is None:
            try:
                check(family, images)
                outcome = "served"
            # Whatever a model raises is what came of it.
            except Exception as error:
                outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        generated = family not in NOT_GENERATED
        found.append({"family": family, "class": name, "images": images, "outcome": outcome, "generated": generated})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "commit": commit(ROOT)}
    path.write_text("".join(json.dumps(x | versions) + "\n" for x in found))
    served = sum(x["outcome"] == "served" for x in found)
    print(f"{served} of {len(found)} families served, {len(NOT_BUILT)} not tried")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
