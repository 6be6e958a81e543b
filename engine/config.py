"""The profile as frozen dataclasses: every key known, typed and checked before a device is touched.

Promises: an unknown key is refused with the nearest known one; a combination that cannot run is refused with what to
change; `to_toml(profile)` read again gives the same profile. 0 and "" mean: taken from the target or its defaults.
"""

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args, get_origin

import tomli_w

from draftgraph.engine.data.anchors import RULES
from draftgraph.engine.devices import whole_name
from draftgraph.engine.errors import UsageError
from draftgraph.profiles.load import ProfileNotFound, read_profile, set_key


def choice(default: str, *known: str) -> Any:
    """A string field that takes `default` or one of `known`."""
    return field(default=default, metadata={"known": (default, *known)})


@dataclass(frozen=True)
class RunSection:
    steps: int = 200
    seed: int = 0


@dataclass(frozen=True)
class TargetSection:
    model: str = "smollm2"  # smollm2, random:SHAPE, a folder, a hub name
    dtype: str = choice("float32", "bfloat16")  # of the target and of the drafter's arithmetic; masters are float32
    forward: str = choice("auto", "fused", "module")  # auto: fused kernels where the family has them, else its module
    # fp8: products of fused forwards; weights quantised at load, rows as they come.
    precision: str = choice("own", "fp8")


@dataclass(frozen=True)
class DrafterSection:
    layers: int = 5
    taps: int = 5
    target_layer_ids: list[int] = field(default_factory=list)  # empty: chosen from `taps`
    block_size: int = 16
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    sliding_layers: int = 0  # the first layers, with `sliding_window`
    sliding_window: int = 2048
    sliding_rule: str = choice("served", "speculators", "bidirectional")  # what a sliding layer sees
    rope_theta: float = 0.0
    mask_token_id: int = -1  # -1: the model's own, where one is known
    anchors: int = 512  # per row, at most
    anchor_rule: str = choice(*RULES)
    reuse: int = 1  # micro-steps fed by one extraction, each with fresh anchors
    loss: str = choice("decay", "dpace")
    labels: str = choice("data", "target", "argmax")  # the data's tokens; the target's distribution, or its best token
    loss_norm: str = choice("auto", "weights", "slots", "rows")  # auto: weights for decay, rows for dpace
    gamma: float = -1.0  # -1: by block size
    alpha: float = 0.5
    chunk_slots: int = 2048  # rows of logits held at once
    recompute: bool = False  # a layer's activations are computed again for its backward, not kept
    init_std: float = 0.02
    init: str = ""  # folder of a drafter in z-lab's form whose weights to start from; empty: random ones


@dataclass(frozen=True)
class DataSection:
    shards: str = ""  # folder written by `draftgraph prepare`
    random_lengths: str = ""  # or a JSON file of row lengths: random tokens, for measuring


@dataclass(frozen=True)
class BucketsSection:
    count: int = 12
    max_context: int = 4096
    context_tokens: int = 8192  # R*S of a bucket, at most
    draft_tokens: int = 65536  # R*A*K of a bucket, at most
    context_multiple: int = 64


@dataclass(frozen=True)
class PlacementSection:
    targets: list[str] = field(default_factory=lambda: ["cpu"])
    drafters: list[str] = field(default_factory=lambda: ["cpu"])
    look_ahead: int = 0  # hand-off slots per drafter; 0: target and drafter share one buffer (one of each, one device)


@dataclass(frozen=True)
class OptimSection:
    lr: float = 6e-4
    warmup: float = 0.04  # share of the steps
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    accumulate: int = 1  # micro-steps in a step, over all drafters
    max_skipped: int = 50  # updates skipped in a row (not finite, or nothing counted) until the next key acts; 0: never
    on_not_finite: str = choice("stop", "keep", "roll-back")  # roll-back: to a good checkpoint, at half the rate


@dataclass(frozen=True)
class CaptureSection:
    mode: str = choice("eager", "graph")
    allow_fallback: list[str] = field(default_factory=list)  # packages whose absence a GPU run may bear: fla, ...
    # What the target's graphs must hold: gated_delta = "fla", causal_conv = "causal_conv1d", attention = "cudnn".
    ops: dict[str, str] = field(default_factory=dict)
    watch: str = choice("report", "strict")  # strict: what breaks the steady state ends the run
    warmup_rounds: int = 2  # eager runs of every step before verification's; the first compiles and is not timed
    verify_rounds: int = 3  # sets of inputs, each run eagerly and replayed


@dataclass(frozen=True)
class CheckpointSection:
    every: int = 100  # steps; 0: only at the end
    keep: int = 2
    keep_best: bool = False  # and the one of the best real acceptance, which is written as soon as it is measured


@dataclass(frozen=True)
class LogSection:
    every: int = 10  # steps
    wandb: str = choice("auto", "off", "offline", "online")  # auto: online where a key is found, else offline
    tensorboard: bool = False
    sample_seconds: float = 1.0  # between samples of the devices; 0: none


@dataclass(frozen=True)
class EvalSection:
    every: int = 0  # steps between evaluations by real decoding during the run; 0: none
    prompts: str = ""  # .jsonl or .txt file, or a shipped one's name; empty: the beginnings of the data's first rows
    count: int = 8  # the first so many
    new_tokens: int = 48  # of an answer, at most


@dataclass(frozen=True)
class Profile:
    run: RunSection = RunSection()
    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    data: DataSection = DataSection()
    buckets: BucketsSection = BucketsSection()
    placement: PlacementSection = PlacementSection()
    optim: OptimSection = OptimSection()
    capture: CaptureSection = CaptureSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    eval: EvalSection = EvalSection()


LARGEST = 2**31

# Ops that have several implementations, as their kernels show (capture/families.py).
OPS = {
    "gated_delta": ("fla",),
    "causal_conv": ("causal_conv1d", "fla", "draftgraph"),
    "attention": ("cudnn", "flash", "efficient"),
    "gemm": ("fp8",),
}

POSITIVE = (
    *("run.steps", "drafter.layers", "drafter.taps", "drafter.anchors", "drafter.reuse", "drafter.chunk_slots"),
    *("buckets.count", "buckets.max_context", "buckets.context_tokens", "buckets.draft_tokens"),
    *("buckets.context_multiple", "optim.lr", "optim.clip", "optim.accumulate", "capture.warmup_rounds"),
    *("capture.verify_rounds", "checkpoint.keep", "log.every", "eval.count", "eval.new_tokens"),
)
NOT_NEGATIVE = (
    *("run.seed", "drafter.heads", "drafter.kv_heads", "drafter.head_dim", "drafter.intermediate_size"),
    *("drafter.sliding_layers", "drafter.rope_theta", "drafter.alpha", "drafter.init_std", "placement.look_ahead"),
    *("optim.warmup", "optim.eps", "optim.weight_decay", "optim.max_skipped", "checkpoint.every", "eval.every"),
    "log.sample_seconds",
)
# Of these a plan or a schedule makes so many things.
AT_MOST = {
    "drafter.layers": 128,
    "drafter.reuse": 128,
    "buckets.count": 64,
    "placement.look_ahead": 128,
    "optim.accumulate": 8192,
}


def load_profile(name: str, assignments: list[str] | None = None) -> Profile:
    """Read, override, type and check a profile.

    Raises:
        UsageError: naming the key, what was found and what to write.
    """
    try:
        values = read_profile(name)
        for assignment in assignments or []:
            set_key(values, assignment)
    except (ProfileNotFound, ValueError, OSError) as error:
        where = f"profile {name}: " if isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError | OSError) else ""
        raise UsageError(f"{where}{error}") from error
    return from_values(values)


def from_values(values: dict[str, Any]) -> Profile:
    sections = {f.name: f.type for f in dataclasses.fields(Profile)}
    built: dict[str, Any] = {}
    for name, keys in values.items():
        refuse_unknown(name, list(sections), "section")
        if not isinstance(keys, dict):
            raise UsageError(f"profile: [{name}] is a section, found {keys!r}; write {name}.KEY or [{name}]")
        fields = {f.name: f for f in dataclasses.fields(sections[name])}  # type: ignore[arg-type]
        for key in keys:
            refuse_unknown(key, list(fields), f"key of [{name}]")
        built[name] = sections[name](**{k: typed(f"{name}.{k}", v, fields[k]) for k, v in keys.items()})  # type: ignore[operator]
    if placement := built.get("placement"):
        names = {key: [whole_name(name) for name in getattr(placement, key)] for key in ("targets", "drafters")}
        built["placement"] = dataclasses.replace(placement, **names)
    profile = Profile(**built)
    check(profile)
    return profile


def refuse_unknown(name: str, known: list[str], kind: str) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
        raise UsageError(f"profile: unknown {kind} {name!r}; {hint}")


def typed(where: str, value: Any, described: dataclasses.Field) -> Any:
    kind = get_origin(described.type) or described.type
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is kind is int and abs(value) >= LARGEST:
        raise UsageError(f"profile: {where} must be a number below {LARGEST:,}, found {value}")
    if type(value) is kind is float and not math.isfinite(value):
        raise UsageError(f"profile: {where} must be a finite number, found {value}")
    if type(value) is not kind:
        names = {dict: "a table of names", list: 'a list, such as ["cpu"]'}
        raise UsageError(f"profile: {where} takes {names.get(kind, kind.__name__)}, found {value!r}")  # type: ignore
    if kind is str and "\0" in value:
        raise UsageError(f"profile: {where} holds a NUL character, which no name and no path can")
    if kind is list:
        item = get_args(described.type)[0]
        value = [float(v) if item is float and type(v) is int else v for v in value]
        if not all(type(v) is item for v in value):
            raise UsageError(f"profile: {where} takes a list of {item.__name__}, found {value!r}")
    if kind is dict and not all(type(v) is str for v in value.values()):
        raise UsageError(f'profile: {where} takes names, such as {{ attention = "cudnn" }}, found {value!r}')
    known = described.metadata.get("known")
    if known and value not in known:
        nearest = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise UsageError(f"profile: {where} is one of {', '.join(known)}, found {value!r}{hint}")
    return value


def check(profile: Profile) -> None:
    """Refuse what cannot run, before a device is touched."""
    for name in POSITIVE:
        if (value := attrgetter(name)(profile)) <= 0:
            raise UsageError(f"profile: {name} must be above 0, found {value}")
    for name in NOT_NEGATIVE:
        if (value := attrgetter(name)(profile)) < 0:
            raise UsageError(f"profile: {name} must be 0 or more, found {value}")
    for name, most in AT_MOST.items():
        if (value := attrgetter(name)(profile)) > most:
            raise UsageError(f"profile: {name} is at most {most}, found {value}")
    betas = profile.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UsageError(f"profile: optim.betas takes two numbers from 0 to below 1, found {betas}")
    if profile.optim.on_not_finite == "roll-back" and profile.checkpoint.keep < 3:
        raise UsageError(
            f"profile: optim.on_not_finite = 'roll-back' needs checkpoint.keep = 3, found {profile.checkpoint.keep}"
        )
    drafter, placement = profile.drafter, profile.placement
    if profile.optim.warmup > 1 or drafter.alpha > 1:
        raise UsageError("profile: optim.warmup (a share of the steps) and drafter.alpha are from 0 to 1")
    if (drafter.loss, drafter.labels) == ("dpace", "target"):
        raise UsageError(
            'profile: drafter.loss = "dpace" weighs by the probability of one token; write drafter.labels = "argmax", '
            'or drafter.loss = "decay" for the whole distribution'
        )
    if drafter.sliding_layers and drafter.sliding_window < 1:
        raise UsageError(f"profile: drafter.sliding_window must be above 0, found {drafter.sliding_window}")
    if profile.buckets.context_multiple > profile.buckets.max_context:
        raise UsageError(
            f"profile: buckets.context_multiple ({profile.buckets.context_multiple}) is above buckets.max_context "
            f"({profile.buckets.max_context}); every row would be padded beyond it"
        )
    if not 2 <= drafter.block_size <= 16:
        raise UsageError(f"profile: drafter.block_size is 2 to 16, found {drafter.block_size}")
    if profile.buckets.max_context > profile.buckets.context_tokens:
        raise UsageError(
            f"profile: buckets.context_tokens ({profile.buckets.context_tokens}) cannot hold one row of "
            f"buckets.max_context ({profile.buckets.max_context}) tokens; raise the former or lower the latter"
        )
    if drafter.anchors * drafter.block_size > profile.buckets.draft_tokens:
        raise UsageError(
            f"profile: buckets.draft_tokens ({profile.buckets.draft_tokens}) cannot hold one row of drafter.anchors * "
            f"drafter.block_size ({drafter.anchors * drafter.block_size}) draft tokens; raise it, or lower the latter"
        )
    if drafter.sliding_layers > drafter.layers:
        raise UsageError(
            f"profile: drafter.sliding_layers ({drafter.sliding_layers}) is more than drafter.layers ({drafter.layers})"
        )
    if not placement.targets or not placement.drafters:
        raise UsageError("profile: placement.targets and placement.drafters each need at least one device")
    if placement.look_ahead == 0 and (
        len(placement.targets) > 1 or len(placement.drafters) > 1 or placement.targets != placement.drafters
    ):
        raise UsageError(
            "profile: placement.look_ahead = 0 shares one buffer and needs one target and one drafter on one device; "
            "set placement.look_ahead to 1 or more"
        )
    capture, devices = profile.capture, placement.targets + placement.drafters
    if capture.mode == "graph" and "cpu" in devices:
        raise UsageError(
            'profile: capture.mode = "graph" needs a CUDA device for every target and drafter; write capture.mode = '
            '"eager" for the CPU, or place all of them on "cuda:0"'
        )
    if profile.checkpoint.keep_best and not profile.eval.every:
        raise UsageError("profile: checkpoint.keep_best needs evaluations during the run; set eval.every, in steps")
    for name in capture.allow_fallback:
        if name not in ("fla", "causal_conv1d"):
            raise UsageError(f"profile: capture.allow_fallback takes fla and causal_conv1d, found {name!r}")
    for op, name in capture.ops.items():
        refuse_unknown(op, list(OPS), "key of [capture.ops]")
        if name not in OPS[op]:
            raise UsageError(f"profile: capture.ops.{op} is one of {', '.join(OPS[op])}, found {name!r}")
    if capture.mode == "graph" and capture.verify_rounds < 3:
        raise UsageError("profile: capture.verify_rounds is at least 3 for graphs")
    if bool(profile.data.shards) == bool(profile.data.random_lengths):
        raise UsageError(
            "profile: name the data once: data.shards = a folder written by `draftgraph prepare`, or "
            "data.random_lengths = a JSON file of row lengths"
        )


def to_toml(profile: Profile) -> str:
    """The whole profile, defaults written out."""
    return tomli_w.dumps(dataclasses.asdict(profile))
