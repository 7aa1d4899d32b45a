"""Calculates the memory that a training process needs from a plan.

The result is an estimate: allocators reserve more than they are asked for, and libraries allocate buffers.
docs/train/model-sizes.md compares calculated and measured values.
"""

from dataclasses import dataclass, replace

from evergrad_common.text import size
from evergrad_manifest.derive import loss_chunk, num_logits, num_references
from evergrad_manifest.training import Optimizer, Runtime, Training

_ACTIVATIONS_PER_LAYER = 17
"""Values kept for the backward pass without recomputation, per token and block, in hidden sizes."""
_KEPT_PER_LAYER = {"full": 1, "offload": 1, "selective": 12}
"""The same with recomputation. ``full`` and ``offload`` keep only the input. ``selective`` also keeps the
results of matrix products and attention, about 12 for a Llama with grouped queries."""
_ACCELERATOR_CONTEXT = int(1.5 * 2**30)
"""Bytes on an accelerator for the driver, the code of kernels and the buffers of NCCL."""
_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0}
"""Values that an optimizer keeps per parameter. The values of Adafactor per row and column are neglected."""
_WEIGHT_BYTES = {"fp32": 4, "bf16-autocast": 4, "fp16-autocast": 4, "bf16": 2}
_AVERAGE_BYTES = 4
GROUPS_GATHERED = 2
"""Blocks whose weights FSDP2 gathers at the same time: the current block and the prefetched block."""


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a model that the calculation needs."""

    parameters: int
    """Number of all parameters."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    trained: int | None = None
    """Number of parameters of adapters; None if all parameters are trained."""
    eager_heads: int = 0
    """Heads of eager attention, which stores a score for each pair of tokens; 0 if a fused kernel is used."""
    unrounded: int = 0
    """Parameters outside the vocabulary tables that autocast does not round; for example, fused experts."""

    @property
    def num_trained(self) -> int:
        """Number of parameters that have gradients and moments."""
        return self.parameters if self.trained is None else self.trained

    def scaled(self, factor: float) -> "ModelFacts":
        """Return a model of the same depth and vocabulary that is ``factor`` times as wide."""
        tables = min(2 * self.vocab_size * self.hidden_size, self.parameters)
        blocks = self.parameters - tables
        hidden = max(1, int(self.hidden_size * factor))
        parameters = int(blocks * factor**2 + tables * factor)
        # The matrices of an adapter grow linearly with the width of a layer.
        trained = None if self.trained is None else int(self.trained * factor)
        return replace(
            self,
            parameters=parameters,
            hidden_size=hidden,
            trained=trained,
            unrounded=int(self.unrounded * factor**2),
        )


@dataclass(frozen=True)
class Need:
    """The memory that one process needs, in bytes.

    ``state``: weights, gradients and moments, with the copies that precision and exact sums need.
    """

    state: int
    gathered: int
    """Weights and gradients of sharded modules while they are gathered."""
    activations: int
    logits: int
    fixed: int
    host: int = 0
    """Host memory that a process with an accelerator needs for activations; not included in ``total``."""

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.logits + self.fixed

    def list_parts(self, num_processes: int) -> str:
        """Describe the memory that ``num_processes`` processes need together. Parts of size 0 are omitted."""
        parts = {
            "state": self.state,
            "gathered": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
        }
        shown = {name: size(part * num_processes) for name, part in parts.items() if part}
        return ", ".join(f"{name} {text}" for name, text in shown.items())


def checkpoint_bytes(facts: ModelFacts, training: Training) -> int:
    """Return the bytes of a checkpoint: trained weights, moments and the average."""
    values = facts.num_trained + _count_moments(facts, training.optimizer)
    averaged = 0 if training.ema is None else _AVERAGE_BYTES * facts.num_trained
    return values * _WEIGHT_BYTES[training.runtime.precision] + averaged


def _count_moments(facts: ModelFacts, optimizer: Optimizer) -> int:
    """Return the number of values that the optimizer keeps."""
    if optimizer.type == "sgd" and not optimizer.momentum:
        return 0
    # With Muon, the vocabulary tables are trained by AdamW, which keeps one more value per parameter.
    further = 0
    if optimizer.type == "muon" and facts.trained is None:
        further = _count_tables(facts)
    return _MOMENTS[optimizer.type] * facts.num_trained + further


def _count_tables(facts: ModelFacts) -> int:
    """Return the number of parameters of the vocabulary tables, which are outside the blocks."""
    return min(2 * facts.vocab_size * facts.hidden_size, facts.parameters)


def memory_of(
    facts: ModelFacts,
    training: Training,
    *,
    world_size: int,
    on_accelerator: bool,
    compiles: bool,
) -> Need:
    """Return the memory that each of ``world_size`` processes needs to train the model with ``training``."""
    runtime = training.runtime
    weight = _WEIGHT_BYTES[runtime.precision]
    product = 4 if runtime.precision == "fp32" else 2
    is_sharded = runtime.parallelism == "fsdp2" and world_size > 1
    tables = _count_tables(facts)
    block = (facts.parameters - tables) // max(1, facts.num_layers)

    # Weights, gradients and moments. Reference models and the frozen weights of LoRA have only weights.
    references = num_references(training)
    values = facts.num_trained + _count_moments(facts, training.optimizer)
    lora = training.model.lora
    base_dtype = None if lora is None else lora.base_dtype
    base = weight if base_dtype is None else _WEIGHT_BYTES[base_dtype]
    state = weight * values + base * (1 + references) * facts.parameters
    if training.ema is not None:
        state += _AVERAGE_BYTES * facts.num_trained
    if is_sharded:
        state //= runtime.shards or world_size
        # Weights are gathered in the type of products, except weights that autocast does not round, such as
        # the embedding (half of the tables). Gradients of a block are whole until they are reduced, in the
        # type of the weights.
        unrounded = facts.unrounded // max(1, facts.num_layers)
        gathered = (
            GROUPS_GATHERED * (block * product + unrounded * (weight - product))
            + 2 * block * weight
            + tables * (product + weight) // 2
            + tables * weight
        )
        # The blocks of a reference are freed before the blocks of the model are gathered, but its head is
        # needed at the same time as the head of the model.
        gathered += references * facts.vocab_size * facts.hidden_size * product
    else:
        exact = 8 if training.reproducibility.elastic == "exact" else 0
        casts = 2 if weight != product else 0
        state += exact * facts.num_trained + (1 + references) * casts * facts.parameters
        # A compiled block returns all its gradients together, in addition to the buckets.
        gathered = block * weight if compiles and world_size > 1 else 0

    tokens = training.batching.micro_batch_size * training.sample_tokens
    activations, host = _activations(
        facts,
        runtime,
        values=tokens * facts.hidden_size * product,
        # Eager attention keeps the softmax for each pair of tokens in fp32 and in the type of products.
        scores=tokens * training.data.sequence_length * facts.eager_heads * (4 + product),
        on_accelerator=on_accelerator,
    )
    # Logits are kept in the type of products and in fp32, with their gradient in fp32. If the loss is
    # computed in chunks, the gradient of the head is also summed in fp32.
    chunk_tokens = loss_chunk(training)
    chunk = min(tokens, chunk_tokens or tokens)
    logits = chunk * facts.vocab_size * (product + 8) * num_logits(training)
    if chunk_tokens is not None:
        logits += 4 * facts.vocab_size * facts.hidden_size
    fixed = _ACCELERATOR_CONTEXT if on_accelerator else 0
    return Need(state, gathered, activations, logits, fixed, host)


def _activations(
    facts: ModelFacts, runtime: Runtime, *, values: int, scores: int, on_accelerator: bool
) -> tuple[int, int]:
    """Return the bytes that the forward pass keeps for the backward pass, on the device and on the host.

    ``values``: bytes of one tensor of shape (tokens, hidden size). ``scores``: bytes of a layer's scores.
    """
    inner = values * _ACTIVATIONS_PER_LAYER + scores
    if runtime.activation_checkpointing == "none":
        return inner * facts.num_layers, 0
    # Every block keeps some values, and one block at a time is recomputed.
    kept = values * _KEPT_PER_LAYER[runtime.activation_checkpointing]
    if runtime.activation_checkpointing == "offload" and on_accelerator:
        # torch allocates pinned memory in powers of two.
        return inner, (1 << (kept - 1).bit_length()) * facts.num_layers
    return inner + kept * facts.num_layers, 0


def largest_fit(
    facts: ModelFacts,
    training: Training,
    *,
    available: int,
    world_size: int,
    on_accelerator: bool,
    compiles: bool,
) -> ModelFacts | None:
    """Return the widest model of the same depth, vocabulary and plan that fits in ``available`` bytes.

    Returns None if no model fits.
    """

    def fits(factor: float) -> bool:
        one = facts.scaled(factor)
        need = memory_of(
            one,
            training,
            world_size=world_size,
            on_accelerator=on_accelerator,
            compiles=compiles,
        )
        return need.total <= available

    # Bisect, because memory grows with the width; 40 halvings are finer than one parameter.
    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return facts.scaled(low) if low > 1e-3 else None
