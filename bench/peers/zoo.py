"""The models of the zoo that have a PyTorch twin, with their options and defaults.

Needs no PyTorch; twins.py has the twins themselves. Names and defaults are those of
`reprise train --help`.
"""
import dataclasses

TASKS = ("images", "pixels", "sequences", "language")
UNITS = {"images": "images/s", "pixels": "images/s", "sequences": "samples/s",
         "language": "tokens/s"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """Options are those of the command, with underscores. Options that a twin does not
    have, such as the width of torchvision's networks, are missing."""
    task: str
    options: dict
    dropout: float = 0  # in timed runs; losses are compared without
    convolutional: bool = False  # trained with channels last
    batch_norm: bool = False  # the loss depends on the micro-batches
    plain: bool = False  # of the plug-in in bench/plain


def images(size, channels, classes, **options):
    return dict(image_size=size, channels=channels, classes=classes, **options)


def vit(depth, width):
    return Spec("images", images(224, 3, 1000, depth=depth, width=width, heads=width // 64))


def bert(depth, width):
    return Spec("sequences", dict(depth=depth, width=width, heads=width // 64, vocab=30522,
                                  seq=512, classes=2), dropout=0.1)


def gpt2(depth, width):
    return Spec("language", dict(depth=depth, width=width, heads=width // 64, vocab=50257,
                                 seq=1024))


def llama(depth, width, mlp_width, heads, kv_heads, vocab, seq=2048):
    return Spec("language", dict(depth=depth, width=width, mlp_width=mlp_width, heads=heads,
                                 kv_heads=kv_heads, vocab=vocab, seq=seq))


def network(size, channels, classes, task="images", batch_norm=True, **options):
    dropout = options.pop("dropout", 0)
    return Spec(task, images(size, channels, classes, **options), dropout, True, batch_norm)


def plain(task, options, convolutional=False, batch_norm=False):
    return Spec(task, options, 0, convolutional, batch_norm, plain=True)


MODELS = {
    "mlp": Spec("images", images(28, 1, 10, depth=4, width=512)),
    "cnn-basic": network(224, 1, 10, norm="batch"),
    "cnn-blocks": network(112, 1, 10, depth=5, width=16),
    "cnn-profile": network(256, 1, 10, batch_norm=False),
    "vgg16": network(224, 3, 1000, batch_norm=False, dropout=0.5),
    "resnet18": network(224, 3, 1000),
    "resnet50": network(224, 3, 1000),
    "resnet101": network(224, 3, 1000),
    "unet": network(128, 1, 11, "pixels", depth=4, width=64),
    "vit-b-16": vit(12, 768),
    "vit-l-16": vit(24, 1024),
    "bert-base": bert(12, 768),
    "bert-large": bert(24, 1024),
    "gpt2": gpt2(12, 768),
    "gpt2-medium": gpt2(24, 1024),
    "gpt2-large": gpt2(36, 1280),
    "gpt2-xl": gpt2(48, 1600),
    "llama-small": llama(4, 256, 768, 8, 2, 256, 256),
    "llama-2-7b": llama(32, 4096, 11008, 32, 32, 32000),
    "llama-3.2-1b": llama(16, 2048, 8192, 32, 8, 128256),
    "llama-3.2-3b": llama(28, 3072, 8192, 24, 8, 128256),
    "llama-3-8b": llama(32, 4096, 14336, 32, 8, 128256),
    "qwen2.5-0.5b": llama(24, 896, 4864, 14, 2, 151936),
    "qwen2.5-1.5b": llama(28, 1536, 8960, 12, 2, 151936),
    "qwen2.5-7b": llama(28, 3584, 18944, 28, 4, 152064),
    "plain-mlp": plain("images", images(28, 1, 10, depth=12, width=1024)),
    "plain-resnet": plain("images", images(64, 3, 10, depth=8, width=64), True, True),
    "plain-mobile": plain("images", images(64, 3, 10, depth=12, width=128), True, True),
    "plain-text": plain("sequences", dict(depth=4, width=512, vocab=8192, seq=256,
                                          classes=10)),
    "plain-encoder": plain("sequences", dict(depth=8, width=512, heads=8, vocab=8192, seq=256,
                                             classes=10)),
    "plain-autoencoder": plain("images", images(128, 3, 10, depth=4, width=32), True),
}
INTEGERS = ("depth", "width", "heads", "kv_heads", "mlp_width", "classes", "vocab", "seq",
            "image_size", "channels")


def resolve(name, given):
    """All options of a model. Throws if it does not have one of those given."""
    spec = MODELS[name]
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in spec.options:
            raise RuntimeError(f"the twin of {name} has no option {key.replace('_', '-')}; it "
                               f"has {', '.join(spec.options).replace('_', '-')}")
    return {**spec.options, **given}


def flags(options):
    """Options as flags of the command."""
    return [word for key, value in options.items()
            for word in ("--" + key.replace("_", "-"), str(value))]


def add_model_arguments(parser):
    for key in INTEGERS:
        parser.add_argument("--" + key.replace("_", "-"), type=int)
    parser.add_argument("--norm", choices=("batch", "group"))


def given_options(arguments):
    return {key: getattr(arguments, key) for key in (*INTEGERS, "norm")
            if getattr(arguments, key) is not None}
