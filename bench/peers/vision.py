"""Twins of the zoo's image models: torchvision's where it has them."""
import functools

import torch
from torch import nn
from torch.nn import functional as F


def torchvision():
    try:
        import torchvision
    except ImportError as error:
        raise SystemExit(f"this twin needs torchvision: {error}") from None
    return torchvision


def named(**layers):
    block = nn.Sequential()
    for name, layer in layers.items():
        block.add_module(name, layer)
    return block


class ImageLoss(nn.Module):
    """Sum of the losses of a network's scores; that of an image is the mean of its pixels."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, y):
        loss = F.cross_entropy(self.body(x).float(), y, reduction="sum")
        return loss / y[0].numel()


def make_torchvision(name, options, dropout):
    if options["channels"] != 3:
        raise SystemExit(f"torchvision's {name} has 3 channels, got {options['channels']}")
    given = {"dropout": dropout} if name == "vgg16" else {}
    body = getattr(torchvision().models, name)(num_classes=options["classes"], **given)
    if name == "vgg16" and options["image_size"] < 32:
        raise SystemExit("vgg16 takes images of 32 pixels and more")
    return ImageLoss(body)


def make_vit(name, options, dropout):
    width = options["width"]
    body = torchvision().models.VisionTransformer(
        image_size=options["image_size"], patch_size=16, num_layers=options["depth"],
        num_heads=options["heads"], hidden_dim=width, mlp_dim=4 * width,
        num_classes=options["classes"], dropout=dropout,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-12))
    if options["channels"] != 3:
        raise SystemExit(f"torchvision's ViT has 3 channels, got {options['channels']}")
    # Zero in the original, which gives no gradient to what comes before.
    nn.init.normal_(body.heads.head.weight, std=0.02)
    return ImageLoss(body)


VIT_LAYER = {"ln_1": "layernorm_before", "ln_2": "layernorm_after",
             "self_attention.out_proj": "attention.output.dense",
             "mlp.0": "intermediate.dense", "mlp.3": "output.dense"}
VIT_REST = {"class_token": "vit.embeddings.cls_token",
            "encoder.pos_embedding": "vit.embeddings.position_embeddings",
            "conv_proj": "vit.embeddings.patch_embeddings.projection",
            "encoder.ln": "vit.layernorm", "heads.head": "classifier"}


def vit_names(state):
    """Tensors with Hugging Face's names instead of torchvision's."""
    result = {}
    for name, tensor in state.items():
        if name in VIT_REST:
            result[VIT_REST[name]] = tensor
            continue
        stem, kind = name.rsplit(".", 1)
        if stem in VIT_REST:
            result[f"{VIT_REST[stem]}.{kind}"] = tensor
            continue
        number, part = name[len("encoder.layers.encoder_layer_"):].split(".", 1)
        layer = f"vit.encoder.layer.{number}."
        if part.startswith("self_attention.in_proj_"):
            for key, third in zip(("query", "key", "value"), tensor.chunk(3)):
                result[f"{layer}attention.attention.{key}.{part.rsplit('_', 1)[1]}"] = third
            continue
        stem, kind = part.rsplit(".", 1)
        stem = stem.replace("mlp.linear_1", "mlp.0").replace("mlp.linear_2", "mlp.3")
        result[f"{layer}{VIT_LAYER[stem]}.{kind}"] = tensor
    return result


def conv_block(from_channels, to):
    return named(conv=nn.Conv2d(from_channels, to, 3, padding=1, bias=False),
                 norm=nn.BatchNorm2d(to), relu=nn.ReLU(inplace=True))


class UNet(nn.Module):
    """The names of its parameters are the zoo's."""

    def __init__(self, options):
        super().__init__()
        channels, width = options["channels"], options["width"]
        self.depth = options["depth"]
        for i in range(self.depth):
            self.add_module(f"down{i}", named(first=conv_block(channels, width),
                                              second=conv_block(width, width)))
            channels, width = width, 2 * width
        self.bottom = named(first=conv_block(channels, width),
                            second=conv_block(width, width))
        for i in reversed(range(self.depth)):
            level = nn.Module()
            level.enlarge = nn.ConvTranspose2d(width, width // 2, 2, stride=2)
            level.first = conv_block(width, width // 2)
            level.second = conv_block(width // 2, width // 2)
            self.add_module(f"up{i}", level)
            width //= 2
        self.head = nn.Conv2d(width, options["classes"], 1)

    def forward(self, x):
        kept = []
        for i in range(self.depth):
            kept.append(getattr(self, f"down{i}")(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.bottom(x)
        for i in reversed(range(self.depth)):
            level = getattr(self, f"up{i}")
            x = level.second(level.first(torch.cat([kept.pop(), level.enlarge(x)], 1)))
        return self.head(x)


def make_unet(name, options, dropout):
    return ImageLoss(UNet(options))


def make_mlp(name, options, dropout):
    model = nn.Sequential(nn.Flatten())
    inputs = options["channels"] * options["image_size"]**2
    for i in range(options["depth"]):
        model.add_module(f"hidden{i}", nn.Linear(inputs, options["width"]))
        model.add_module(f"relu{i}", nn.ReLU())
        inputs = options["width"]
    model.add_module("head", nn.Linear(inputs, options["classes"]))
    return ImageLoss(model)


# Channels of cnn-basic, and the image size that enters there.
BASIC = [(8, 3584), (16, 1792), (24, 896), (32, 448), (40, 224), (48, 112), (56, 56),
         (64, 28), (72, 0), (80, 0), (88, 0), (96, 0)]


def make_cnn_basic(name, options, dropout):
    model, channels = nn.Sequential(), options["channels"]
    sizes = [side for _, side in BASIC]
    if options["image_size"] not in sizes[:8]:
        raise SystemExit(f"cnn-basic takes images of {sizes[7::-1]} pixels")
    for i, (following, _) in enumerate(BASIC[sizes.index(options["image_size"]):]):
        norm = (nn.BatchNorm2d(following) if options["norm"] == "batch"
                else nn.GroupNorm(following // 8, following))
        model.add_module(f"block{i}", named(
            conv=nn.Conv2d(channels, following, 2, stride=2, padding=int(following == 80)),
            norm=norm, relu=nn.ReLU()))
        channels = following
    model.add_module("flat", nn.Flatten())
    model.add_module("hidden", nn.Linear(channels, 32))
    model.add_module("relu", nn.ReLU())
    model.add_module("head", nn.Linear(32, options["classes"]))
    return ImageLoss(model)


def make_cnn_blocks(name, options, dropout):
    model, channels = nn.Sequential(), options["channels"]
    for i in range(options["depth"]):
        following = options["width"] << min(i, 2)
        model.add_module(f"block{i}", named(
            conv=nn.Conv2d(channels, following, 3, padding=1),
            norm=nn.BatchNorm2d(following), relu=nn.ReLU(), pool=nn.MaxPool2d(2)))
        channels = following
    model.add_module("pool", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    model.add_module("head", nn.Linear(channels, options["classes"]))
    return ImageLoss(model)


def make_cnn_profile(name, options, dropout):
    model, channels = nn.Sequential(), options["channels"]
    for i, following in enumerate((10, 20, 40, 60, 40, 40, 40, 40, 40, 20, 20)):
        model.add_module(f"conv{i}", nn.Conv2d(channels, following, 5, padding=2))
        model.add_module(f"relu{i}", nn.ReLU())
        model.add_module(f"pool{i}", nn.MaxPool2d(1 if i < 10 else 2))
        channels = following
    model.add_module("flat", nn.Flatten())
    model.add_module("dense0", nn.Linear(channels * (options["image_size"] // 2)**2, 32))
    model.add_module("relu", nn.ReLU())
    model.add_module("dense1", nn.Linear(32, options["classes"]))
    return ImageLoss(model)


def vision_blocks(module):
    """Modules that are checkpointed, as (parent, name)."""
    body = module.body
    kind = type(body).__name__
    if kind == "VGG":  # up to each pooling
        parts, part = nn.Sequential(), nn.Sequential()
        for layer in body.features:
            part.append(layer)
            if isinstance(layer, nn.MaxPool2d):
                parts.append(part)
                part = nn.Sequential()
        body.features = parts
        return [(parts, name) for name, _ in parts.named_children()]
    if kind == "ResNet":
        layers = [getattr(body, f"layer{i}") for i in range(1, 5)]
    elif kind == "VisionTransformer":
        layers = [body.encoder.layers]
    elif kind == "UNet":
        layers = [level for name, level in body.named_children() if name != "head"]
    else:
        layers = [body]
    return [(layer, name) for layer in layers for name, child in layer.named_children()
            if any(True for _ in child.parameters()) and name != "enlarge"]


MAKERS = {
    "mlp": make_mlp, "cnn-basic": make_cnn_basic, "cnn-blocks": make_cnn_blocks,
    "cnn-profile": make_cnn_profile, "vgg16": make_torchvision, "resnet18": make_torchvision,
    "resnet50": make_torchvision, "resnet101": make_torchvision, "unet": make_unet,
    "vit-b-16": make_vit, "vit-l-16": make_vit,
}
