"""Twins of the plug-in in bench/plain: models of PyTorch's layers alone, with the names of its
parameters."""
import torch
from torch import nn
from torch.nn import functional as F

from language import class_loss


class Chain(nn.Module):
    """Stem, blocks and head, one after the other."""

    def __init__(self, stem, blocks, head, loss=class_loss):
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.loss = loss

    def forward(self, x, y):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(self.head(hidden), y)


class MlpBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + F.gelu(self.norm(self.linear(x)))


class FlatLinear(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x):
        return self.linear(x.flatten(1))


class ConvStem(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


class SeparableBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.pointwise = nn.Conv2d(width, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.silu(self.norm1(self.depthwise(x)))
        return F.silu(self.norm2(self.pointwise(y)))


class PooledLinear(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x):
        return self.linear(x.mean((2, 3)))


class Embedded(nn.Module):
    """Tokens (N, T) to (T, N, width)."""

    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(options["vocab"], options["width"])
        self.places = nn.Embedding(options["seq"], options["width"])

    def forward(self, x):
        return (self.tokens(x) + self.places.weight[:x.shape[1]]).transpose(0, 1)


class LstmBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(width), nn.LSTM(width, width)

    def forward(self, x):
        return x + self.lstm(self.norm(x))[0]


class MeanLinear(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x):
        return self.linear(x.mean(0))


class DownBlock(nn.Module):
    def __init__(self, width, following):
        super().__init__()
        self.conv = nn.Conv2d(width, following, 4, stride=2, padding=1)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.1)


class UpBlock(nn.Module):
    def __init__(self, width, following):
        super().__init__()
        self.conv = nn.ConvTranspose2d(width, following, 4, stride=2, padding=1)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.1)


class Autoencoder(Chain):
    def forward(self, x, y):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden).float() - x).square().mean((1, 2, 3)).sum()


def make_mlp(name, options, dropout):
    width = options["width"]
    inputs = options["channels"] * options["image_size"]**2
    return Chain(FlatLinear(inputs, width), [MlpBlock(width) for _ in range(options["depth"])],
                 nn.Linear(width, options["classes"]))


def make_network(block):
    def make(name, options, dropout):
        width = options["width"]
        return Chain(ConvStem(options["channels"], width),
                     [block(width) for _ in range(options["depth"])],
                     PooledLinear(width, options["classes"]))
    return make


def make_text(name, options, dropout):
    width = options["width"]
    return Chain(Embedded(options), [LstmBlock(width) for _ in range(options["depth"])],
                 MeanLinear(width, options["classes"]))


def make_encoder(name, options, dropout):
    width = options["width"]
    blocks = [nn.TransformerEncoderLayer(width, options["heads"], 4 * width, dropout=0.0)
              for _ in range(options["depth"])]
    return Chain(Embedded(options), blocks, MeanLinear(width, options["classes"]))


def make_autoencoder(name, options, dropout):
    width, depth = options["width"], options["depth"]
    blocks = [DownBlock(width << i, width << (i + 1)) for i in range(depth)]
    blocks += [UpBlock(width << (i + 1), width << i) for i in reversed(range(depth))]
    model = Autoencoder(nn.Conv2d(options["channels"], width, 3, padding=1), blocks,
                        nn.Conv2d(width, options["channels"], 3, padding=1))
    for parameter in model.parameters():  # the usual weights give an image of zeros
        if parameter.dim() == 4:
            nn.init.kaiming_normal_(parameter)
    return model


def plain_blocks(module):
    """Modules that are checkpointed, as (parent, name)."""
    return [(module.blocks, name) for name, _ in module.blocks.named_children()]


MAKERS = {
    "plain-mlp": make_mlp, "plain-resnet": make_network(ResidualBlock),
    "plain-mobile": make_network(SeparableBlock), "plain-text": make_text,
    "plain-encoder": make_encoder, "plain-autoencoder": make_autoencoder,
}
