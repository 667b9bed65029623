"""Hugging Face's config.json as a `Llama`, and back.

Of type llama, mistral and qwen2. A config.json that asks for a feature that the network
lacks is an error.
"""

from typing import Any

from models.llama import Llama

Config = dict[str, Any]

KINDS = ("llama", "mistral", "qwen2")
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Fields that change the computation, and their values that do not.
NEUTRAL = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


def network(config: Config) -> Llama:
    """The network of a config.json."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(
            f"config.json has model_type {kind!r}: one of {', '.join(KINDS)} is "
            "required; other decoders compute something else."
        )
    missing = [field for field in REQUIRED if field not in config]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}.")
    for field, allowed in NEUTRAL.items():
        if config.get(field, allowed[0]) not in allowed:
            raise ValueError(
                f"config.json has {field} {config[field]!r}: only {allowed[0]!r} is "
                "supported."
            )
    heads = config["num_attention_heads"]
    return Llama(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        hidden=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        length=length(config),
        rope_base=rope_base(config),
        epsilon=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        biased=biased(config),
    )


def length(config: Config) -> int:
    """The longest sequence whose attention is causal and not limited otherwise."""
    slides = (
        config["model_type"] == "mistral"
        or config.get("use_sliding_window")
        or "sliding_attention" in (config.get("layer_types") or ())
    )
    # Mistral's and Qwen2's default, where config.json has none.
    window = config.get("sliding_window", 4096) if slides else None
    longest = config["max_position_embeddings"]
    return longest if window is None else min(longest, window)


def rope_base(config: Config) -> float:
    """Of rotary positions; newer files have it beside their scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"config.json scales rotary positions by {rope}: only rope_type 'default' "
            "is supported."
        )
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def biased(config: Config) -> tuple[str, ...]:
    """The maps that add a bias."""
    if config["model_type"] == "qwen2":
        return "q", "k", "v"
    attention = ("q", "k", "v", "o") if config.get("attention_bias") else ()
    feed = ("gate", "up", "down") if config.get("mlp_bias") else ()
    return attention + feed


def config_of(net: Llama) -> Config:
    """The config.json of a network."""
    is_qwen2 = net.biased == ("q", "k", "v")
    biases = {"attention_bias": "o" in net.biased, "mlp_bias": "up" in net.biased}
    return {
        "architectures": ["Qwen2ForCausalLM" if is_qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if is_qwen2 else "llama",
        "num_hidden_layers": net.layers,
        "hidden_size": net.width,
        "num_attention_heads": net.heads,
        "num_key_value_heads": net.kv_heads,
        "head_dim": net.head_width,
        "intermediate_size": net.hidden,
        "vocab_size": net.vocabulary,
        "max_position_embeddings": net.length,
        "rope_theta": net.rope_base,
        "rms_norm_eps": net.epsilon,
        "tie_word_embeddings": net.tied,
        "hidden_act": "silu",
    } | ({} if is_qwen2 else biases)
