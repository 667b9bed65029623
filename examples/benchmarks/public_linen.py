"""Public models in Flax Linen, each in a few lines: one class is replaced."""

from typing import Any

import jax
import jax.numpy as jnp
from public_setting import Setting, classify, model, next_token, squared
from public_ways import Net, linen


@model("ResNet (Flax)", "flax", "ResNet", "a bottleneck a stage, batch 64, bfloat16")
def resnet(s: Setting) -> Net:
    models = s.load("flax/examples/imagenet", "models")
    if s.way.is_compressed:
        s.wrap(models, "ResNet")
    else:
        s.wrap(models, "BottleneckResNetBlock")
    stages = [1, 1] if s.is_small else [1, 1, 1, 1]
    net = models.ResNet(
        stages,
        models.BottleneckResNetBlock,
        num_classes=1000,
        num_filters=16 if s.is_small else 64,
        dtype=jnp.float32 if s.is_small else jnp.bfloat16,
    )
    batch, side = (16, 64) if s.is_small else (64, 224)
    images, labels = s.floats(batch, side, side, 3), s.tokens(batch, vocabulary=1000)
    net = linen(net, (images, labels), classify)
    return in_axis(net, "batch")


def in_axis(net: Net, name: str) -> Net:
    """The network with a named axis of one device, that BatchNorm averages over."""
    lead = lambda f: jax.vmap(f, in_axes=None, out_axes=0, axis_size=1, axis_name=name)
    first = lambda f: lambda *args: jax.tree.map(lambda x: x[0], lead(f)(*args))
    return Net(first(net.init), first(net.outputs), net.loss, net.inputs)


@model("LM1B decoder (Flax)", "flax", "EncoderDecoder1DBlock", "2 layers, 32 x 512")
def lm1b(s: Setting) -> Net:
    models = s.load("flax/examples/lm1b", "models")
    s.wrap(models, "EncoderDecoder1DBlock")
    vocabulary = 256 if s.is_small else 8192
    sizes = dict(emb_dim=64, qkv_dim=64, mlp_dim=256) if s.is_small else {}
    config = models.TransformerConfig(
        vocabulary, vocabulary, num_heads=4 if s.is_small else 8, num_layers=2, **sizes
    )
    tokens = s.tokens(*((4, 64) if s.is_small else (32, 512)), vocabulary=vocabulary)
    return linen(models.TransformerLM(config), (tokens,), next_token)


@model("GraphNet (jraph)", "flax", "GraphNet", "5 rounds, 16k nodes, 64k edges")
def graphnet(s: Setting) -> Net:
    models = s.load("flax/examples/ogbg_molpcba", "models")
    s.wrap(models, "GraphNet" if s.way.is_compressed else "MLP")
    width, nodes = (32, 128) if s.is_small else (256, 2**14)
    net = models.GraphNet(width, 2, 2 if s.is_small else 5, output_globals_size=16)
    graph = models.jraph.GraphsTuple(
        nodes=s.floats(nodes, 9),
        edges=s.floats(4 * nodes, 3),
        globals=s.floats(nodes // 16, 1),
        senders=s.tokens(4 * nodes, vocabulary=nodes),
        receivers=s.tokens(4 * nodes, vocabulary=nodes),
        n_node=s.counts(nodes // 16, each=16),
        n_edge=s.counts(nodes // 16, each=64),
    )
    loss = lambda graph, x, target: squared(graph.globals, x, target)
    return linen(net, (graph, s.floats(nodes // 16, 16)), loss)


@model("LSTM seq2seq (Flax)", "flax", "Seq2seq", "width 1024, batch 256, 128 steps")
def seq2seq(s: Setting) -> Net:
    models = s.load("flax/examples/seq2seq", "models")
    s.wrap(models, "Seq2seq")
    width, batch, steps = (32, 8, 16) if s.is_small else (1024, 256, 128)
    net = models.Seq2seq(True, width, vocab_size=16)
    one_hot = jax.nn.one_hot
    question = s.tokens(batch, steps, vocabulary=16)
    arguments = lambda q, a: (one_hot(q, 16), one_hot(a, 16))
    loss = lambda found, q, a: classify(found[0], q, a[:, 1:])
    return linen(net, (question, question), loss, arguments)


@model(
    "ViT-B/16 (big_vision)",
    "big_vision",
    "Encoder1DBlock",
    "2 layers, batch 64, bfloat16",
)
def vit(s: Setting) -> Net:
    vit = s.load("big_vision", "big_vision.models.vit", "big_vision.utils")
    s.wrap(vit, "Encoder1DBlock", static=["deterministic"])
    net = vit.Model(1000, variant="mu/16", depth=2, head_zeroinit=False)
    if not s.is_small:
        net = vit.Model(1000, variant="B/16", depth=2, dtype_mm="bfloat16")
    batch, side = (4, 64) if s.is_small else (64, 224)
    images, labels = s.floats(batch, side, side, 3), s.tokens(batch, vocabulary=1000)
    loss = lambda found, x, labels: classify(found[0], x, labels)
    return linen(net, (images, labels), loss, train=True)


@model(
    "MLP-Mixer-B/16 (big_vision)",
    "big_vision",
    "MixerBlock",
    "2 layers, batch 64, float32",
)
def mixer(s: Setting) -> Net:
    mixer = s.load("big_vision", "big_vision.models.mlp_mixer", "big_vision.utils")
    s.wrap(mixer, "MixerBlock", static=["train"])
    sizes = (
        [(16, 16), 1000, 2, 64, 32, 128]
        if s.is_small
        else [(16, 16), 1000, 2, 768, 384, 3072]
    )
    batch, side = (4, 64) if s.is_small else (64, 224)
    images, labels = s.floats(batch, side, side, 3), s.tokens(batch, vocabulary=1000)
    loss = lambda found, x, labels: squared(found[1]["pre_logits"], x, 1.0)
    return linen(mixer.MlpMixer(*sizes), (images, labels), loss, train=True)


@model(
    "GPT-2 small (transformers)",
    "transformers",
    "FlaxGPT2Block",
    "2 layers, 8 x 1024, bfloat16",
)
def gpt2(s: Setting) -> Net:
    code = s.load_package("transformers.models.gpt2.modeling_flax_gpt2")
    s.wrap(code, "FlaxGPT2Block", ["deterministic", "init_cache", "output_attentions"])
    sizes = dict(n_embd=64, n_layer=2, n_head=4) if s.is_small else dict(n_layer=2)
    config = code.GPT2Config(vocab_size=256 if s.is_small else 8192, **sizes)
    dtype = jnp.float32 if s.is_small else jnp.bfloat16
    net = code.FlaxGPT2LMHeadModule(config, dtype=dtype)
    tokens = s.tokens(*(2, 64) if s.is_small else (8, 1024), vocabulary=256)

    def arguments(tokens: jax.Array) -> tuple[Any, ...]:
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return tokens, jnp.ones_like(tokens), places

    loss = lambda found, tokens: next_token(found.logits, tokens)
    return linen(net, (tokens,), loss, arguments, deterministic=False)


@model(
    "UNet of Stable Diffusion (diffusers)", "diffusers", "2 block classes", "batch 4"
)
def diffusion(s: Setting) -> Net:
    blocks = s.load_package("diffusers.models.unets.unet_2d_blocks_flax")
    s.wrap(blocks, "FlaxResnetBlock2D", ["deterministic"])
    s.wrap(blocks, "FlaxTransformer2DModel", ["deterministic"])
    code = s.load_package("diffusers.models.unets.unet_2d_condition_flax")
    kinds: Any = dict(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
    )
    sizes = dict(block_out_channels=(320, 640), dtype=jnp.bfloat16)
    if s.is_small:
        sizes = dict(block_out_channels=(32, 64), cross_attention_dim=32)
    net = code.FlaxUNet2DConditionModel(sample_size=64, **kinds, **sizes)
    batch, side, width = (2, 16, 32) if s.is_small else (4, 64, 1280)
    image, text = s.floats(batch, 4, side, side), s.floats(batch, 77, width)
    times = s.tokens(batch, vocabulary=1000)
    loss = lambda found, image, times, text: squared(found.sample, None, image)
    return linen(net, (image, times, text), loss, lambda *args: args, train=True)
