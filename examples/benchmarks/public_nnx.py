"""Public models in Flax NNX, each in a few lines: one class is replaced."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from public_setting import Setting, classify, model, next_token, squared
from public_ways import Net, functional


@model("Gemma 3 1B (Flax)", "flax", "Block", "2 layers, 4 x 1024, vocabulary 8192")
def gemma(s: Setting) -> Net:
    code = s.load("flax/examples/gemma", "transformer", "sentencepiece")
    s.wrap(code.modules, "Block")
    sizes: Any = dict(num_embed=8192, num_layers=2, dtype=jnp.bfloat16)
    if s.is_small:
        sizes = dict(num_embed=256, num_layers=2, embed_dim=64, hidden_dim=192)
        sizes |= dict(head_dim=16, sliding_window_size=32)
    config = code.TransformerConfig.gemma3_1b(**sizes)
    tokens = s.tokens(*(2, 64) if s.is_small else (4, 1024), vocabulary=256)

    def call(net: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = code.make_causal_attn_mask(tokens > 0)
        return net(tokens, places, None, mask)[0]

    create = lambda: code.Transformer(config, rngs=nnx.Rngs(0))
    return functional(create, call, (tokens,), next_token)


@model(
    "Qwen3-0.6B (bonsai)",
    "bonsai",
    "DecoderLayer",
    "2 layers, 4 x 2048, vocabulary 8192",
)
def qwen3(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.qwen3.modeling")
    s.wrap(code, "DecoderLayer")
    config = code.ModelConfig.qwen3_0_6b()
    cut = dict(num_layers=2, vocab_size=8192)
    if s.is_small:
        cut = dict(num_layers=2, vocab_size=256, emb_dim=64, mlp_dim=192, num_heads=4)
        cut |= dict(head_dim=16, num_kv_heads=2)
    config = dataclasses.replace(config, **cut)
    tokens = s.tokens(*(2, 64) if s.is_small else (4, 2048), vocabulary=256)

    def call(net: Any, tokens: jax.Array) -> jax.Array:
        cache = code.init_cache(config, *tokens.shape, 0, net.embedder.embedding.dtype)
        return net(tokens, cache=cache, segment_ids=(tokens > 0).astype(int))

    create = lambda: code.Qwen3(config, rngs=nnx.Rngs(0))
    return s.in_bfloat16(functional(create, call, (tokens,), next_token))


@model(
    "Mamba2-130M (bonsai)",
    "bonsai",
    "Mamba2Block",
    "2 layers, 4 x 1024, vocabulary 8192",
)
def mamba2(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.mamba2.modeling")
    s.wrap(code, "Mamba2Block")
    config = code.ModelConfig(vocab_size=8192, num_hidden_layers=2)
    if s.is_small:
        config = code.ModelConfig.tiny()
    tokens = s.tokens(*(2, 64) if s.is_small else (4, 1024), vocabulary=256)
    create = lambda: code.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    call = lambda net, tokens: net(tokens)["logits"]
    return functional(create, call, (tokens,), next_token)


@model(
    "Whisper (bonsai)",
    "bonsai",
    "encoder and decoder layers",
    "2 + 2 layers of the tiny one, batch 16, float32",
)
def whisper(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.whisper.modeling")
    s.wrap(code, "WhisperEncoderLayer")
    s.wrap(code, "WhisperDecoderLayer", static=["decode"])
    config = code.ModelConfig.whisper_tiny()
    cut: Any = dict(encoder_layers=2, decoder_layers=2)
    if s.is_small:
        cut |= dict(d_model=64, encoder_attention_heads=4, decoder_ffn_dim=256)
        cut |= dict(encoder_ffn_dim=256)
        cut |= dict(max_source_positions=64, vocab_size=256)
    config = dataclasses.replace(config, **cut)
    batch, frames = (2, 128) if s.is_small else (16, 3000)
    sound, tokens = s.floats(batch, frames, 80), s.tokens(batch, 64, vocabulary=256)

    def create() -> nnx.Module:
        rngs = nnx.Rngs(0)
        parts = (
            code.WhisperEncoder(config, rngs=rngs),
            code.WhisperDecoder(config, rngs=rngs),
        )
        return nnx.List(parts)

    def call(net: Any, sound: jax.Array, tokens: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(tokens)
        found = net[1](tokens, mask, net[0](sound), None, decode=False)
        return net[1].embed_tokens.attend(found)

    loss = lambda logits, sound, tokens: next_token(logits, tokens)
    return functional(create, call, (sound, tokens), loss)


@model("U-Net (bonsai)", "bonsai", "UNet", "batch 8, 256x256, float32")
def unet(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.unet.modeling")
    s.wrap(code, "UNet" if s.way.is_compressed else "DoubleConv")
    widths = (4, 8, 16, 32, 64) if s.is_small else (64, 128, 256, 512, 1024)
    create = lambda: code.UNet(code.ModelConfig(features=widths), rngs=nnx.Rngs(0))
    shape = (4, 64, 64) if s.is_small else (8, 256, 256)
    images, labels = s.floats(*shape, 1), s.tokens(*shape, vocabulary=2)
    call = lambda net, x, labels: net(x)
    return functional(create, call, (images, labels), classify)


@model(
    "EfficientNet-B0 (bonsai)", "bonsai", "EfficientNet", "3 blocks, batch 64, float32"
)
def efficientnet(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.efficientnet.modeling")
    s.wrap(
        code, "EfficientNet" if s.way.is_compressed else "MBConv", static=["training"]
    )
    config = code.ModelConfig.b0()
    blocks = code.BlockConfigs(config.block_configs.items[:2])
    config = dataclasses.replace(config, block_configs=blocks)
    batch, side = (8, 32) if s.is_small else (64, 224)
    images, labels = s.floats(batch, side, side, 3), s.tokens(batch, vocabulary=1000)
    create = lambda: code.EfficientNet(config, rngs=nnx.Rngs(0))
    call = lambda net, x, labels: net(x, training=True)
    return functional(create, call, (images, labels), classify)


@model("ConvNeXt-T (bonsai)", "bonsai", "Block", "a block a stage, batch 64, float32")
def convnext(s: Setting) -> Net:
    code = s.load("bonsai", "bonsai.models.convnext.modeling")
    s.wrap(code, "Block", static=["train"])
    config = code.ModelConfig.convnext_tiny_224()
    cut: Any = dict(stage_depths=(1, 1, 1, 1))
    if s.is_small:
        cut |= dict(stage_dims=(16, 32, 48, 64))
    config = dataclasses.replace(config, **cut)
    batch, side = (4, 64) if s.is_small else (64, 224)
    images, labels = s.floats(batch, side, side, 3), s.tokens(batch, vocabulary=1000)
    create = lambda: code.ConvNeXt(config, rngs=nnx.Rngs(0))
    call = lambda net, x, labels: net(x, rngs=jax.random.key(2), train=True)
    return functional(create, call, (images, labels), classify)


def maxtext(s: Setting, kind: str, layer: str, **options: Any) -> Net:
    """Two decoder layers of MaxText, without embeddings."""
    code = s.load("maxtext/src", f"maxtext.models.{kind}")
    s.wrap(code, layer, static=["deterministic", "model_mode"])
    pyconfig = importlib.import_module("maxtext.configs.pyconfig")
    sizes = dict(base_emb_dim=64, base_mlp_dim=192, head_dim=16, max_target_length=64)
    if not s.is_small:
        sizes = dict(base_emb_dim=2048, base_mlp_dim=7168, max_target_length=2048)
    sizes |= dict(
        base_num_query_heads=16, base_num_kv_heads=4, base_num_decoder_layers=2
    )
    config = pyconfig.initialize(
        [None, str(s.code / "maxtext/src/maxtext/configs/base.yml")],
        override_model_config=True,
        run_name="public",
        enable_checkpointing=False,
        attention="dot_product",
        per_device_batch_size=2.0,
        scan_layers=False,
        dtype="float32" if s.is_small else "bfloat16",
        **sizes,
        **options,
    )
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    make = lambda: getattr(code, layer)(
        config=config, mesh=mesh, model_mode="train", rngs=nnx.Rngs(0)
    )
    shape = 2, config.max_target_length
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape)

    def call(net: Any, x: jax.Array) -> jax.Array:
        for block in net:
            x = block(x, jnp.ones(shape, int), places, True, "train")[0]
        return x

    x = s.floats(*shape, config.emb_dim, dtype=config.dtype)
    loss = lambda y, x: squared(y, None, jnp.roll(x, 1))
    with mesh:
        return functional(lambda: nnx.List([make(), make()]), call, (x,), loss)


@model("Llama layers (MaxText)", "maxtext", "LlamaDecoderLayer", "2 layers, 2 x 2048")
def llama(s: Setting) -> Net:
    return maxtext(s, "llama2", "LlamaDecoderLayer", decoder_block="llama2")


@model(
    "Mixtral layers (MaxText)",
    "maxtext",
    "MixtralDecoderLayer",
    "2 layers, 8 experts, 2 x 2048",
)
def mixtral(s: Setting) -> Net:
    experts = dict(num_experts=8, num_experts_per_tok=2, megablox=False)
    experts |= dict(sparse_matmul=False, base_moe_mlp_dim=192 if s.is_small else 7168)
    return maxtext(
        s, "mixtral", "MixtralDecoderLayer", decoder_block="mixtral", **experts
    )
