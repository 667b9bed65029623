"""Decoders as Hugging Face keeps them: a folder of config.json, safetensors, tokenizer.

Networks of type llama, mistral and qwen2. A folder that asks for a feature that
`models/llama.py` lacks raises an error that names it. Two things that a checkpoint may
hold are skipped: a second copy of a tied embedding, and the speeds of rotary positions.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models.llama import Llama
from models.llama_config import Config, config_of, network
from safetensors import safe_open
from safetensors.numpy import save_file

Params = dict[str, Any]
HEAD = "lm_head.weight"
# From our names of a layer's parameters to Hugging Face's.
MAPS = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {
    name: f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
GAINS = {
    "attention_gain": "input_layernorm",
    "feed_gain": "post_attention_layernorm",
}


def load(folder: Path, dtype: Any = jnp.bfloat16) -> tuple[Llama, Params]:
    """The network of a folder and its parameters, all of `dtype`.

    Parameters are read one by one: no second copy of all of them is made.

    Raises:
      ValueError: the network is of another kind, or the checkpoint lacks a tensor, has
        one too many, or has one of another shape or dtype.
    """
    net = network(json.loads(text_of(folder / "config.json")))
    with contextlib.ExitStack() as stack:
        files = tensors(folder, stack)
        check_names(net, set(files), folder)

        def read(place: Place) -> jax.Array:
            found = np.empty(place.shape, dtype)
            for index, name in place.tensors():
                tensor = checked(files[name], name, place.stored_shape)
                found[index] = tensor.T if place.transposed else tensor
            return jnp.asarray(found)

        params = jax.tree.map(read, places(net))
        if net.tied and HEAD in files:
            head = checked(files[HEAD], HEAD, params["tokens"].shape).astype(dtype)
            if not np.array_equal(head, params["tokens"]):
                raise ValueError(
                    f"{folder}: {HEAD} differs from the embedding, and config.json has "
                    "tie_word_embeddings true: a head of its own requires false."
                )
    return net, params


def shapes(folder: Path, dtype: Any = jnp.bfloat16) -> tuple[Llama, Params]:
    """The network of a config.json and its parameters' shapes, as `load` has them."""
    net = network(json.loads(text_of(folder / "config.json")))
    of_dtype = lambda shape: jax.ShapeDtypeStruct(shape.shape, dtype)
    return net, jax.tree.map(of_dtype, net.shapes)


def save(folder: Path, net: Llama, params: Params) -> None:
    """Write config.json and model.safetensors, with the parameters' own dtypes."""
    found: dict[str, np.ndarray] = {}

    def add(place: Place, leaf: jax.Array) -> None:
        for index, name in place.tensors():
            tensor = np.asarray(leaf[index])
            tensor = tensor.T if place.transposed else tensor
            found[name] = np.ascontiguousarray(tensor)

    jax.tree.map(add, places(net), params)
    write(folder, "config.json", config_of(net), "model.safetensors", found)


def save_adapters(folder: Path, adapters: Params, alpha: float, base: str) -> None:
    """Write adapters as the library `peft` does; they add a @ b * alpha / rank.

    Args:
      adapters: `q_a` [layers, inputs, rank] and `q_b` [layers, rank, outputs], and so
        on for every adapted map.
      base: name or folder of the network they are for.
    """
    found: dict[str, np.ndarray] = {}
    for key, stack in adapters.items():
        name, letter = key.split("_")
        for layer, matrix in enumerate(np.asarray(stack)):
            place = f"base_model.model.model.layers.{layer}.{MAPS[name]}"
            tensor = np.ascontiguousarray(matrix.T)  # there [outputs, inputs]
            found[f"{place}.lora_{letter.upper()}.weight"] = tensor
    names = sorted({MAPS[key.split("_")[0]].split(".")[1] for key in adapters})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": next(v.shape[-1] for key, v in adapters.items() if key.endswith("_a")),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": names,
    }
    write(folder, "adapter_config.json", config, "adapter_model.safetensors", found)


def encoder(folder: Path, vocabulary: int) -> Callable[[str], np.ndarray]:
    """A function from text to int32 tokens [N]: tokenizer.json's, or UTF-8 bytes.

    Bytes only where the folder has no tokenizer of any kind; that is printed.
    """
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()  # some files cut at the network's length
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    else:
        others = sorted(p.name for p in (*folder.glob("tok*"), *folder.glob("vocab*")))
        if others or vocabulary < 256:
            raise ValueError(
                f"{folder} has no tokenizer.json, but {', '.join(others) or 'nothing'} "
                f"(vocabulary {vocabulary}). The fast tokenizer's file is required."
            )
        print(f"{folder} has no tokenizer: the bytes of UTF-8 are the tokens")
        encode = lambda text: np.frombuffer(text.encode(), np.uint8)

    def tokens(text: str) -> np.ndarray:
        found = np.asarray(encode(text), np.int32)
        if found.max(initial=0) >= vocabulary:
            raise ValueError(
                f"{folder}: tokenizer.json gives token {found.max()}, the network's "
                f"vocabulary ends at {vocabulary - 1}. Both of one model are required."
            )
        return found

    return tokens


@dataclass(frozen=True)
class Place:
    """Where a checkpoint has one of our parameters.

    Attributes:
      name: of its tensor, or of its tensors with {} for the number of the layer.
      shape: of our parameter, with a leading axis of layers where there is {}.
      transposed: there the matrix is [outputs, inputs]; ours is [inputs, outputs].
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each of its tensors."""
        shape = self.shape[1:] if self.stacked else self.shape
        return shape[::-1] if self.transposed else shape

    def tensors(self) -> Iterator[tuple[Any, str]]:
        """Pairs: an index into our parameter, the name of the tensor for it."""
        if not self.stacked:
            yield ..., self.name
        else:
            yield from ((i, self.name.format(i)) for i in range(self.shape[0]))


def places(net: Llama) -> Params:
    """A `Place` for each parameter of the network."""
    outer = {
        "tokens": "model.embed_tokens.weight",
        "gain": "model.norm.weight",
        "head": HEAD,
    }

    def one(path: Any, shape: Any) -> Place:
        key, shape = path[-1].key, shape.shape
        if key in outer:
            return Place(outer[key], shape)
        prefix = "model.layers.{}."
        if key in MAPS:
            return Place(f"{prefix}{MAPS[key]}.weight", shape, transposed=True)
        if key in GAINS:
            return Place(f"{prefix}{GAINS[key]}.weight", shape)
        return Place(f"{prefix}{MAPS[key.removesuffix('_bias')]}.bias", shape)

    return jax.tree.map_with_path(one, net.shapes)


def check_names(net: Llama, found: set[str], folder: Path) -> None:
    """Raise unless the checkpoint has all that the network needs, and nothing else."""
    all_places = jax.tree.leaves(places(net))
    needed = {name for place in all_places for _, name in place.tensors()}
    spare = {HEAD} if net.tied else set()
    unused = {
        n for n in found - needed - spare if not n.endswith("rotary_emb.inv_freq")
    }
    problems = [
        f"{verb} {', '.join(sorted(names)[:8])}{', ...' if len(names) > 8 else ''}"
        for verb, names in (("lacks", needed - found), ("has no use for", unused))
        if names
    ]
    if problems:
        raise ValueError(
            f"{folder}: by its config.json the network {' and '.join(problems)}. "
            "config.json and all tensors of one whole model are required."
        )


def tensors(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor of the checkpoint; `stack` closes them."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if not (folder / "model.safetensors").exists() and index.exists():
        names = set(json.loads(text_of(index))["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing:
        raise ValueError(
            f"{folder} lacks {', '.join(missing)}. A model.safetensors, or a "
            "model.safetensors.index.json and the files it names, is required."
        )
    files = [stack.enter_context(safe_open(folder / n, "numpy")) for n in sorted(names)]
    return {name: file for file in files for name in file.keys()}


def checked(file: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of the file, which must have this shape and be of floats."""
    found = file.get_slice(name)
    given = found.get_dtype(), tuple(found.get_shape())
    if given[0] not in ("BF16", "F16", "F32") or given[1] != shape:
        raise ValueError(
            f"{name} is {given[0]} {list(given[1])}; BF16, F16 or F32 {list(shape)} is "
            "required by config.json."
        )
    return file.get_tensor(name)


def write(
    folder: Path, config_name: str, config: Config, name: str, found: Any
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config_name).write_text(json.dumps(config, indent=2), encoding="utf-8")
    # Without the format, transformers refuses the file.
    save_file(found, folder / name, metadata={"format": "pt"})


def text_of(path: Path) -> str:
    if not path.exists():
        raise ValueError(f"{path.parent} has no {path.name}.")
    return path.read_text(encoding="utf-8")
