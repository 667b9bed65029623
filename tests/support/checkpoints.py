"""Checkpoints of small decoders, written by hand, and what they compute in float64.

From the papers, shares no code with `examples/models/llama.py`.
"""

import json

import numpy as np
import pytest

save_file = pytest.importorskip("safetensors.numpy").save_file

LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100.0,
    "vocab_size": 11,
    "max_position_embeddings": 9,
    "hidden_act": "silu",
    "transformers_version": "4.40.0",
}
MISTRAL = LLAMA | {
    "model_type": "mistral",
    "head_dim": 8,
    "sliding_window": None,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "tie_word_embeddings": True,
    "sliding_window": 4,
    "use_sliding_window": False,
}
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
CONFIGS = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "biased": BIASED}


def tensors_of(config, dtype, seed=0):
    """Random tensors under the names that Hugging Face gives them."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    d, hidden = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or d // heads
    found = {
        "model.embed_tokens.weight": normal(config["vocab_size"], d),
        "model.norm.weight": 1 + normal(d) / 4,
    }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = normal(config["vocab_size"], d)
    qwen2 = config["model_type"] == "qwen2"
    attention_bias = config.get("attention_bias", False)
    maps = {
        "self_attn.q": (heads * width, d, qwen2 or attention_bias),
        "self_attn.k": (kv_heads * width, d, qwen2 or attention_bias),
        "self_attn.v": (kv_heads * width, d, qwen2 or attention_bias),
        "self_attn.o": (d, heads * width, attention_bias),
        "mlp.gate": (hidden, d, config.get("mlp_bias", False)),
        "mlp.up": (hidden, d, config.get("mlp_bias", False)),
        "mlp.down": (d, hidden, config.get("mlp_bias", False)),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = 1 + normal(d) / 4
        for name, (outputs, inputs, has_bias) in maps.items():
            weight = normal(outputs, inputs) * inputs**-0.5
            found[f"{layer}{name}_proj.weight"] = weight
            if has_bias:
                found[f"{layer}{name}_proj.bias"] = normal(outputs)
    return {name: tensor.astype(dtype) for name, tensor in found.items()}


def write(folder, config, tensors, shards=1):
    """A checkpoint: one file, or several and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    places = {}
    for i in range(shards):
        names = list(tensors)[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in names}, folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def rms_norm(x, gain, epsilon):
    return x / np.sqrt(np.mean(x**2) + epsilon) * gain


def turned(head, position, base):
    """Each pair of a head as a complex number, times that of its angle."""
    half = len(head) // 2
    z = head[:half] + 1j * head[half:]
    z = z * [np.exp(1j * position * base ** (-2 * i / len(head))) for i in range(half)]
    return np.concatenate([z.real, z.imag])


def oracle(config, tensors, tokens):
    """Logits of one sequence in float64, position by position and head by head."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    base, epsilon = rope["rope_theta"], config["rms_norm_eps"]
    stream = [w["model.embed_tokens.weight"][token] for token in tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."

        def dense(name, x, layer=layer):
            y = w[f"{layer}{name}_proj.weight"] @ x
            return y + w.get(f"{layer}{name}_proj.bias", 0)

        gain = w[layer + "input_layernorm.weight"]
        q, k, v = [], [], []
        for t, x in enumerate(stream):
            h = rms_norm(x, gain, epsilon)
            split = lambda name, n, h=h: np.split(dense(f"self_attn.{name}", h), n)
            q.append([turned(head, t, base) for head in split("q", heads)])
            k.append([turned(head, t, base) for head in split("k", kv_heads)])
            v.append(split("v", kv_heads))
        for t in range(len(stream)):
            mixed = []
            for head in range(heads):
                own = head * kv_heads // heads
                query = q[t][head]
                powers = [
                    np.exp(query @ k[s][own] / np.sqrt(len(query)))
                    for s in range(t + 1)
                ]
                shares = np.array(powers) / sum(powers)
                mixed.append(sum(shares[s] * v[s][own] for s in range(t + 1)))
            stream[t] = stream[t] + dense("self_attn.o", np.concatenate(mixed))
        gain = w[layer + "post_attention_layernorm.weight"]
        for t, x in enumerate(stream):
            h = rms_norm(x, gain, epsilon)
            gate = dense("mlp.gate", h)
            h = gate / (1 + np.exp(-gate)) * dense("mlp.up", h)
            stream[t] = x + dense("mlp.down", h)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    final = [rms_norm(x, w["model.norm.weight"], epsilon) for x in stream]
    return np.stack([head @ x for x in final])
