"""The samples of `reprise train --data random` with its default seed, for twins of its models.

The generators are those of src/data/random.cpp and src/data/loader.cpp, so that a twin sees
the same samples, and in the same micro-batches: SplitMix64 for the samples, a Mersenne
Twister for the order of an epoch.
"""
import numpy
import torch
from torch.nn import functional as F

SEED = 1  # default of --seed
IMAGE_SIDE = 28  # of random images, which are enlarged
MEAN, DEVIATION = 0.5, 0.2898
STEP = numpy.uint64(0x9e3779b97f4a7c15)


def splitmix(x):
    """Output function of SplitMix64 for an array of uint64."""
    with numpy.errstate(over="ignore"):
        x = numpy.asarray(x, dtype=numpy.uint64) + STEP
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xbf58476d1ce4e5b9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94d049bb133111eb)
        return x ^ (x >> numpy.uint64(31))


def combine(a, b):
    with numpy.errstate(over="ignore"):
        return splitmix(splitmix(a) + numpy.asarray(b, dtype=numpy.uint64))


def words(samples, count):
    """The first `count` random numbers of each sample of the training split."""
    keys = combine(combine(SEED, 0), numpy.arange(samples))
    with numpy.errstate(over="ignore"):
        return splitmix(keys[:, None] + STEP * numpy.arange(count, dtype=numpy.uint64))


def below(numbers, limit):
    limit = numpy.uint64(limit)
    return (((numbers >> numpy.uint64(32)) * limit) >> numpy.uint64(32)).astype(numpy.int64)


def tokens(samples, seq, vocab):
    """Tokens (N, T), and the next tokens as targets."""
    numbers = torch.from_numpy(below(words(samples, seq + 1), vocab))
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()


def sequences(samples, seq, vocab, classes):
    """Tokens (N, T), and a class for each sequence."""
    numbers = words(samples, seq + 1)
    return (torch.from_numpy(below(numbers[:, 1:], vocab)),
            torch.from_numpy(below(numbers[:, 0], classes)))


def images(samples, channels, classes, size, pixel_classes=False):
    """Normalized images (N, C, size, size), and a class for each image or pixel."""
    count = channels * IMAGE_SIDE**2
    numbers = words(samples, 1 + (count + 7) // 8)
    values = numbers[:, 1:].astype("<u8").view(numpy.uint8)[:, :count]
    pixels = torch.from_numpy(values.reshape(samples, channels, IMAGE_SIDE, IMAGE_SIDE).copy())
    # One class of pixels is the background.
    labels = torch.from_numpy(below(numbers[:, 0], classes - int(pixel_classes)))
    enlarged = pixels.float() / 255
    if size != IMAGE_SIDE:
        enlarged = F.interpolate(enlarged, size=(size, size), mode="bilinear",
                                 align_corners=False)
    if pixel_classes:
        labels = (enlarged[:, 0] > 0.5).long() * (labels + 1).view(-1, 1, 1)
    return (enlarged - MEAN) / DEVIATION, labels


class MersenneTwister:
    """std::mt19937_64."""
    SIZE, SHIFT, MASK = 312, 156, 2**64 - 1

    def __init__(self, seed):
        self.state = [seed & self.MASK]
        for i in range(1, self.SIZE):
            last = self.state[-1]
            self.state.append((6364136223846793005 * (last ^ (last >> 62)) + i) & self.MASK)
        self.used = self.SIZE

    def next(self):
        if self.used == self.SIZE:
            for i in range(self.SIZE):
                joined = ((self.state[i] & ~(2**31 - 1)) |
                          (self.state[(i + 1) % self.SIZE] & (2**31 - 1)))
                self.state[i] = (self.state[(i + self.SHIFT) % self.SIZE] ^ (joined >> 1) ^
                                 (0xb5026f5aa96619e9 if joined & 1 else 0))
            self.used = 0
        x = self.state[self.used]
        self.used += 1
        x ^= (x >> 29) & 0x5555555555555555
        x ^= (x << 17) & 0x71d67fffeda60000
        x ^= (x << 37) & 0xfff7eee000000000
        return (x ^ (x >> 43)) & self.MASK


def order(samples, epoch):
    """The order of the samples in an epoch."""
    random = MersenneTwister(int(combine(SEED, epoch)))
    result = list(range(samples))
    for i in range(samples, 1, -1):
        number = random.next()
        while number < 2**64 % i:
            number = random.next()
        j = number % i
        result[i - 1], result[j] = result[j], result[i - 1]
    return result
