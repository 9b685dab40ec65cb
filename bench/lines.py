"""The trainings that gpu.py compares, and what it knows of each."""
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
import zoo  # noqa: E402


@dataclasses.dataclass
class Line:
    name: str
    model: str
    micro: int
    accumulate: int
    techniques: list
    precision: str = "bf16"
    options: dict = dataclasses.field(default_factory=dict)  # of the model
    memory: object = None  # bytes as text, or (share, technique): of the technique's peak
    flags: tuple = ()  # more flags of the command
    weight_decay: float = 0.01
    tf32: bool = False  # in timed fp32 runs
    trainer: bool = False  # compared with Hugging Face's Trainer, not with the twin

    def __post_init__(self):
        self.spec = zoo.MODELS[self.model]
        self.options = zoo.resolve(self.model, self.options)

    @property
    def window(self):
        return self.micro * self.accumulate

    @property
    def unit(self):
        return zoo.UNITS[self.spec.task]

    @property
    def scale(self):
        """Units per sample."""
        return self.options["seq"] if self.spec.task == "language" else 1

    @property
    def learning_rate(self):
        """Learning rate. Image models learn a few samples by heart in four updates of a
        larger one, and rounding to bf16 then decides how fast."""
        return 1e-5 if self.precision == "bf16" and "image_size" in self.options else 1e-4

    @property
    def tolerance(self):
        """Of the losses. bf16 rounds differently, and BatchNorm amplifies it."""
        if self.precision == "fp32":
            return 2e-3
        return 2e-2 if self.spec.batch_norm else 5e-3

    @property
    def free_micro(self):
        """Whether the command may choose a smaller micro-batch to stay in its memory. It would
        change the statistics of BatchNorm, and for BERT the comparison. Lines with several
        micro-batches are about their size."""
        return (self.memory is not None and self.accumulate == 1 and
                not self.spec.batch_norm and not self.spec.plain and
                self.spec.task in ("language", "images"))

    def model_words(self):
        """Model and options for the command and for the twin."""
        return ["--model", self.model, *zoo.flags(self.options)]

    def command_flags(self, timed):
        words = [*self.model_words(), "--precision", self.precision, "--optimizer", "adamw",
                 "--lr", self.learning_rate, "--weight-decay", self.weight_decay, *self.flags]
        if self.model.startswith(("gpt2", "bert", "vgg")):
            words += ["--dropout", self.spec.dropout if timed else 0]
        return words + (["--tf32"] if self.tf32 and timed else [])

    def twin_words(self):
        return [*self.model_words(), "--precision", self.precision, "--lr", self.learning_rate,
                "--weight-decay", self.weight_decay, *(["--tf32"] if self.tf32 else [])]

    def different_when_timed(self):
        return self.command_flags(False) != self.command_flags(True)

    def floor_seconds(self, count, rates):
        """Lower bound of an update: each pass of peers/floor.py takes the time of its
        arithmetic at the rate of a large GEMM or that of its traffic at the rate of a large
        copy, whichever is longer. The update reads weights, gradients and moments and writes
        all but the gradients."""
        half = self.precision == "bf16"
        rate = rates["flops"] if half else rates["tf32"] / (1 if self.tf32 else 3)
        seconds = 0
        for flops, values, held, forward, times in count["passes"]:
            again = 2 if forward and "all" in self.flags else 1
            traffic = (self.micro * values + held) * (2 if half else 4)
            seconds += times * again * max(self.micro * flops / rate,
                                           traffic / rates["bytes"])
        return (self.accumulate * seconds +
                count["parameters"] * 4 * 7 / rates["bytes"])


def network_lines():
    """The small networks on enlarged images."""
    for model in ("cnn-basic", "cnn-blocks"):
        for size, micro, accumulate in ((112, 1, 64), (1792, 16, 1), (3584, 4, 1)):
            options = {"image_size": size}
            if model == "cnn-basic" and size == 112:
                options["norm"] = "group"  # BatchNorm cannot normalize one pixel
            yield Line(f"{model}-{size}-{micro}x{accumulate}", model, micro, accumulate,
                       ["eager", "compile", "compile-graphs", "graph"], "fp32", options,
                       memory=(0.9, "eager") if micro > 1 else None, weight_decay=0,
                       tf32=True)


def trainer_lines():
    """BERT-Large against Hugging Face's Trainer. Losses cannot be compared, because the
    Trainer has dropout."""
    for precision in ("bf16", "fp32"):
        name = f"bert-{precision}-1x4"
        common = dict(precision=precision, weight_decay=0, trainer=True)
        yield Line(name, "bert-large", 1, 4, ["trainer", "compile"], **common)
        yield Line(name + "-all", "bert-large", 1, 4, ["checkpoint", "checkpoint-compile"],
                   flags=("--recompute", "all"), **common)
        if precision == "bf16":
            yield Line(name + "-budget", "bert-large", 1, 4, ["checkpoint"],
                       memory=(1, "checkpoint"), **common)


COMPILED = ["eager", "compile", "compile-budget:0.5"]
LANGUAGE = ["eager", "checkpoint", "compile", "compile-checkpoint"]
TOKENS = {"seq": 1024}
SQUARE = {"image_size": 224}
ROPE_MODELS = (("qwen-1.5b", "qwen2.5-1.5b"), ("llama-1b", "llama-3.2-1b"))

LINES = [
    Line("gpt2-1x32", "gpt2", 1, 32, ["eager", "compile", "compile-graphs", "graph", "llmc"]),
    Line("gpt2-4x8", "gpt2", 4, 8, ["eager", "compile", "llmc"]),
    Line("gpt2-4x8-llmc", "gpt2", 4, 8, ["llmc"], memory=(1, "llmc")),
    Line("gpt2-8x4", "gpt2", 8, 4, ["eager", "compile", "llmc"]),
    Line("gpt2-32x1", "gpt2", 32, 1,
         ["eager", "checkpoint", "selective", "compile", "compile-budget", "llmc", "llmc:1",
          "llmc:2"]),
    Line("gpt2-32x1-12GiB", "gpt2", 32, 1, ["compile", "llmc:2"], memory="12GiB"),
    Line("gpt2-32x1-half", "gpt2", 32, 1, ["eager"], memory=(0.5, "eager")),
    Line("xl-1x8", "gpt2-xl", 1, 8,
         ["checkpoint", "graph-checkpoint", "checkpoint-compile", "compile-budget", "llmc",
          "llmc:2"], flags=("--recompute", "all")),
    Line("xl-1x8-llmc", "gpt2-xl", 1, 8, ["llmc"], memory=(1, "llmc")),
    Line("xl-8x1", "gpt2-xl", 8, 1, ["checkpoint", "checkpoint-compile", "compile-budget"],
         memory=(1, "checkpoint")),
    Line("xl-8x1-free", "gpt2-xl", 8, 1, ["eager", "compile", "llmc"]),
    Line("xl-8x1-36GiB", "gpt2-xl", 8, 1, ["compile-budget", "llmc:1"], memory="36GiB"),
    Line("xl-8x1-26.9GiB", "gpt2-xl", 8, 1, ["checkpoint", "llmc:2"], memory="26.9GiB"),
    *(Line(f"{name}-{micro}x{8 // micro}", model, micro, 8 // micro, LANGUAGE, options=TOKENS)
      for name, model in ROPE_MODELS for micro in (8, 1)),
    *(Line(f"{name}-8x1-75%", model, 8, 1, ["compile"], options=TOKENS,
           memory=(0.75, "compile")) for name, model in ROPE_MODELS),
    *trainer_lines(),
    *(Line(f"bert-{precision}-32x1", "bert-large", 32, 1, [*COMPILED, "checkpoint"], precision)
      for precision in ("bf16", "fp32")),
    Line("bert-bf16-32x1-20GiB", "bert-large", 32, 1, ["eager", "compile"], memory="20GiB"),
    Line("resnet50-256x1", "resnet50", 256, 1, COMPILED),
    Line("resnet50-256x1-compile", "resnet50", 256, 1, ["compile"], memory=(1, "compile")),
    Line("resnet50-256x1-budget", "resnet50", 256, 1, ["compile-budget:0.5"],
         memory=(1, "compile-budget:0.5")),
    Line("resnet101-64x1", "resnet101", 64, 1, COMPILED),
    Line("vgg16-64x1", "vgg16", 64, 1, COMPILED),
    Line("unet-64x1", "unet", 64, 1, COMPILED, options=SQUARE),
    Line("vit-b16-128x1", "vit-b-16", 128, 1, COMPILED),
    Line("vit-b16-128x1-6GiB", "vit-b-16", 128, 1,
         ["compile", "compile-budget:0.5", "checkpoint"],
         memory="6GiB"),
    Line("vit-l16-64x1", "vit-l-16", 64, 1, COMPILED),
    *network_lines(),
]


def plain_lines(sizes=None):
    """Models of plain LibTorch layers, none of them ours, within the memory of eager
    PyTorch. `sizes` replaces both batch sizes."""
    batches = {"plain-mlp": (256, 4096), "plain-resnet": (32, 256), "plain-mobile": (32, 256),
               "plain-text": (16, 128), "plain-encoder": (8, 64), "plain-autoencoder": (32, 256)}
    for model, usual in batches.items():
        for batch in sizes or usual:
            yield Line(f"{model}-{batch}x1", model, batch, 1, ["eager"],
                       memory=(1, "eager"))
