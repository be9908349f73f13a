"""Refuses config.json files that change the computation of a model in ways that no supported family has.

A spec builder reads the keys that it knows, and the config records which keys were read. Some unread keys are refused
by name: a key of this table if it changes the model, and any other key whose name speaks of attention. Otherwise the
model would load and answer wrongly. This module knows nothing of how builders use keys.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from quire_common.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quire_worker.model.architectures.family import Family
    from quire_worker.model.config_file import ConfigFile

_FIX = "Serve another model; or, where the key changes nothing for this one, remove it from config.json."


def _table(*rows: tuple[str, str, Iterable[Any]]) -> Mapping[str, tuple[str, tuple[Any, ...]]]:
    return MappingProxyType({key: (meaning, tuple(neutral)) for keys, meaning, neutral in rows for key in keys.split()})


# Keys, what they ask for, and the values that ask for nothing; null always does.
_UNREAD: Final = _table(
    ("attn_logit_softcapping attention_softcap attn_softcap", "capped attention scores", (0, 0.0)),
    ("final_logit_softcapping logit_softcap logits_soft_cap logits_softcap", "capped logits", (0, 0.0)),
    ("logit_scale logits_scaling logits_scale lm_head_multiplier output_multiplier_scale", "scaled logits", (1,)),
    ("mup_width_multiplier dim_model_base mup_use_scaling", "scaled logits", (0, 1)),
    ("embedding_multiplier scale_emb embed_scale emb_scale embedding_scale", "scaled embeddings", (1,)),
    ("scale_embedding scale_embeddings normalize_embedding normalize_embeddings", "scaled embeddings", (False,)),
    ("residual_multiplier scale_depth residual_scale", "scaled residuals", (1,)),
    ("attention_multiplier attn_scale attention_scale softmax_scale query_pre_attn_scalar", "scaled scores", ()),
    ("key_multiplier attention_in_multiplier attention_out_multiplier ssm_multipliers", "scaled attention", (1,)),
    ("mlp_multipliers", "a scaled MLP", ()),
    ("attn_temperature_tuning scale_attn_by_inverse_layer_idx", "scores scaled by position or layer", (False, 0)),
    ("rotary_pct rotary_percent rope_percentage", "a partial rotary embedding", (1,)),
    ("rope_interleave rope_interleaved", "a rotary embedding of neighbours", (False,)),
    ("no_rope_layers no_rope_layer_interval nope_layer_interval", "layers without positions", ([], 0)),
    ("rope_local_base_freq global_rope_theta local_rope_theta swa_rope_theta", "two rotary embeddings", ()),
    ("mrope_section use_mrope", "a rotary embedding of several axes", (False,)),
    ("alibi use_alibi", "ALiBi", (False,)),
    ("position_embedding_type", "other positions", ("rope", "rotary")),
    ("attention_chunk_size dual_chunk_attention_config sparse_attention_config", "attention in chunks", (0,)),
    ("attention_sink attention_sinks use_attention_sink attention_sink_size", "attention sinks", (False, 0)),
    ("attn_output_gate attention_gate use_gated_attention", "gated attention", (False,)),
    ("use_bidirectional_attention bidirectional", "attention to later positions", (False,)),
    ("is_causal", "attention to later positions", (True,)),
    ("clip_qkv", "clipped queries, keys and values", ()),
    ("kv_lora_rank q_lora_rank v_head_dim", "latent attention", (0,)),
    ("num_kv_shared_layers kv_sharing", "layers that share keys and values", (0, False)),
    ("use_qk_norm qk_norm qk_layernorm", "normed queries and keys", (False,)),
    ("bias qkv_bias attention_out_bias", "biases", (False,)),
    ("post_norm use_post_norm sandwich_norm use_sandwich_norm", "other norms", (False,)),
    ("parallel_attn use_parallel_residual parallel_residual", "attention beside the MLP", (False,)),
    ("hidden_activation", "another activation", ()),
    ("num_experts num_local_experts n_routed_experts moe_num_experts", "experts", (0, 1)),
    ("block_configs", "layers of several sizes", ()),
    ("compression_config quantization", "quantised weights", ()),
)


# Names of keys that speak of attention.
_ATTENTION: Final = re.compile("attn|attention|rope|rotary|sliding|window|softcap|alibi|qk_|_qk|sink|chunk")
# Those of them that change nothing that is computed here.
_SILENT: Final = frozenset(
    (
        "attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_implementation",
        "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "use_flash_attn",
        "use_flash_attention", "use_flash_attention_2", "attn_impl", "max_window_layers", "reorder_and_upcast_attn",
    )
)  # fmt: skip  # a list of names
# Values of unknown keys that ask for nothing.
_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})


def check_config(config: ConfigFile, family: Family) -> None:
    """Raise Unsupported, naming the key, if config.json asks for something that the family's builder did not read. The
    builder must have run before."""
    check_fields(config, family.says)


def check_fields(config: ConfigFile, says: Mapping[str, Any]) -> None:
    """Raise Unsupported for the first key that changes the model and was not read, unless `says` has its value or the
    value asks for nothing.

    Such a key is in the table of known keys, or its name speaks of attention. Null values and keys that change nothing
    are skipped.
    """
    for key, value in config.fields.items():
        if value is None or key in config.seen or value == says.get(key):
            continue
        if key in _UNREAD:
            meaning, neutral = _UNREAD[key]
            if value not in neutral:
                raise refused(config, key, meaning)
        elif _ATTENTION.search(key) and key not in _SILENT and value not in _OFF:
            raise refused(config, key, "attention of another kind")


def check_model_type(config: ConfigFile, family: Family) -> None:
    """Raise Unsupported if config.json has a `model_type` that is not the family's."""
    if config.text("model_type", family.model_type) != family.model_type:
        raise refused(config, "model_type", f"layers that are not {family.model_type}'s")


def refused(config: ConfigFile, key: str, meaning: str) -> Unsupported:
    """Make the error (UNSUPPORTED_CONFIG) for a key whose value asks for `meaning`, which the worker does not compute.
    The caller raises it."""
    shown, own = repr(config.fields.get(key))[:80], config.keys.get(key, key)
    return Unsupported(
        "UNSUPPORTED_CONFIG",
        f"{config.source}: `{own}` is {shown}, which asks for {meaning}; that is not supported.",
        _FIX,
        param=key,
    )
