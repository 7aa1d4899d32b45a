"""Memory that a training process needs, calculated from a plan.

The result is an estimate: allocators keep more than is asked for, and libraries bring buffers of their own.
docs/train/model-sizes.md has what was calculated and what was measured.
"""

from dataclasses import dataclass, replace

from evergrad_common.text import size
from evergrad_manifest.derive import loss_chunk, num_logits, num_references
from evergrad_manifest.training import Optimizer, Runtime, Training

_ACTIVATIONS_PER_LAYER = 17
"""Values of hidden size a token kept per transformer block for the backward pass, without recomputation."""
_KEPT_PER_LAYER = {"full": 1, "offload": 1, "selective": 12}
"""The same with recomputation: the input alone, or with the results of matrix products and attention, which
are about 12 for a Llama with grouped queries."""
_ACCELERATOR_CONTEXT = int(1.5 * 2**30)
"""Memory that the driver, the kernels' code and the buffers of NCCL take on an accelerator."""
_MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0}
"""Values of an optimizer for each parameter; adafactor's few for each row and column are left out."""
_WEIGHT_BYTES = {"fp32": 4, "bf16-autocast": 4, "fp16-autocast": 4, "bf16": 2}
_AVERAGE_BYTES = 4
GROUPS_GATHERED = 2
"""Blocks whose weights FSDP2 holds whole at once: the one that is computed and the one that is fetched."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that the calculation needs."""

    parameters: int
    """All of them."""
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    trained: int | None = None
    """Parameters of adapters; None: all parameters are trained."""
    eager_heads: int = 0
    """Heads of eager attention, which holds a score for each pair of tokens; 0: a kernel holds none."""
    unrounded: int = 0
    """Parameters outside of the tables that autocast does not round, such as experts that are one tensor."""

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        return self.parameters if self.trained is None else self.trained

    def scaled(self, factor: float) -> "ModelFacts":
        """A model of the same depth and vocabulary that is ``factor`` times as wide."""
        tables = min(2 * self.vocab_size * self.hidden_size, self.parameters)
        blocks = self.parameters - tables
        hidden = max(1, int(self.hidden_size * factor))
        parameters = int(blocks * factor**2 + tables * factor)
        # An adapter's matrices are as long as a layer is wide.
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
    """Bytes of one process.

    ``state``: weights, gradients, moments and what precision and exact sums keep beside them.
    """

    state: int
    gathered: int
    """Weights and gradients of shards that are whole for a moment."""
    activations: int
    logits: int
    fixed: int
    host: int = 0
    """Memory of the host that an accelerator's process needs for activations; no part of ``total``."""

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.activations + self.logits + self.fixed

    def list_parts(self, num_processes: int) -> str:
        """Name the memory that so many processes need together, without parts that are nothing."""
        parts = {
            "state": self.state,
            "gathered": self.gathered,
            "activations": self.activations,
            "logits": self.logits,
        }
        shown = {name: size(part * num_processes) for name, part in parts.items() if part}
        return ", ".join(f"{name} {text}" for name, text in shown.items())


def checkpoint_bytes(facts: ModelFacts, training: Training) -> int:
    """Trained weights, moments and the average, as saved."""
    values = facts.num_trained + _count_moments(facts, training.optimizer)
    averaged = 0 if training.ema is None else _AVERAGE_BYTES * facts.num_trained
    return values * _WEIGHT_BYTES[training.runtime.precision] + averaged


def _count_moments(facts: ModelFacts, optimizer: Optimizer) -> int:
    """Values that the optimizer keeps."""
    if optimizer.type == "sgd" and not optimizer.momentum:
        return 0
    # Muon leaves tables to AdamW.
    further = 0
    if optimizer.type == "muon" and facts.trained is None:
        further = _count_tables(facts)
    return _MOMENTS[optimizer.type] * facts.num_trained + further


def _count_tables(facts: ModelFacts) -> int:
    """Parameters of the tables of the vocabulary, which lie outside the blocks."""
    return min(2 * facts.vocab_size * facts.hidden_size, facts.parameters)


def memory_of(
    facts: ModelFacts,
    training: Training,
    *,
    world_size: int,
    on_accelerator: bool,
    compiles: bool,
) -> Need:
    """The memory that each of ``world_size`` processes needs to train the model as ``training`` says."""
    runtime = training.runtime
    weight = _WEIGHT_BYTES[runtime.precision]
    product = 4 if runtime.precision == "fp32" else 2
    is_sharded = runtime.parallelism == "fsdp2" and world_size > 1
    tables = _count_tables(facts)
    block = (facts.parameters - tables) // max(1, facts.num_layers)

    # Weights, gradients and moments; a reference has weights alone, and so has what adapters stand beside.
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
        # Gathered in the products' type, but for what autocast does not round: the embedding, half of the
        # tables, and the like. A block's gradients are whole until they are reduced, in the weights' type.
        unrounded = facts.unrounded // max(1, facts.num_layers)
        gathered = (
            GROUPS_GATHERED * (block * product + unrounded * (weight - product))
            + 2 * block * weight
            + tables * (product + weight) // 2
            + tables * weight
        )
        # A reference's blocks are gone before the model's come; its head is needed beside the model's.
        gathered += references * facts.vocab_size * facts.hidden_size * product
    else:
        exact = 8 if training.reproducibility.elastic == "exact" else 0
        casts = 2 if weight != product else 0
        state += exact * facts.num_trained + (1 + references) * casts * facts.parameters
        # A compiled block gives all its gradients at once, beside the buckets that they are added to.
        gathered = block * weight if compiles and world_size > 1 else 0

    tokens = training.batching.micro_batch_size * training.sample_tokens
    activations, host = _activations(
        facts,
        runtime,
        values=tokens * facts.hidden_size * product,
        # Eager attention keeps the scores of each pair of tokens: their softmax in fp32, and in the type of
        # the products.
        scores=tokens * training.data.sequence_length * facts.eager_heads * (4 + product),
        on_accelerator=on_accelerator,
    )
    # As the products give them, in fp32, and their gradient in fp32. In chunks, the head's gradient is summed
    # in fp32 beside them.
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
    """The bytes that the forward pass keeps for the backward pass: of the process, and of its host beside
    it. ``values``: bytes of a value of hidden size for each token. ``scores``: bytes of a layer's scores."""
    inner = values * _ACTIVATIONS_PER_LAYER + scores
    if runtime.activation_checkpointing == "none":
        return inner * facts.num_layers, 0
    # Values that are kept of every block, and one block that is computed again.
    kept = values * _KEPT_PER_LAYER[runtime.activation_checkpointing]
    if runtime.activation_checkpointing == "offload" and on_accelerator:
        # torch takes pinned memory in powers of two.
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
    """The widest model of the same depth, vocabulary and plan whose process fits ``available``; None if none
    does."""

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

    # By halves: memory grows with the width, and 40 halves are finer than a parameter.
    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return facts.scaled(low) if low > 1e-3 else None
