"""The task of edits on a tiny corpus: stored states equal newly computed states, a predictor begins at the
trivial baseline, and its metrics."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from latent_corpus import ENCODER, seal, training, write_corpus, write_lines
from torch import Tensor

from evergrad_latent_edit import LatentEditTask, features
from evergrad_latent_edit.edits import type_of
from evergrad_latent_edit.encoder import Encoder, encode
from evergrad_latent_edit.features import FeatureCache
from evergrad_latent_edit.modules import ActionEncoder, Predictor
from evergrad_latent_edit.source import (
    NO_MER,
    EditSource,
    digits_of,
    mers_of,
    types_of,
)
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError, ModelError
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.models.build import ModelPlan, build_model, plan_model
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.recipes import load_task
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.task import Modules, Setup

NO_TEXT = Prepared((), (), tokenizer_identity="", vocab_size=0, end_of_document=0)
MIXTURE = [
    {"family": "population", "count": 2, "edits": 2},
    {"family": "syntheticIndel", "count": 1},
    {"family": "clinical", "count": 1, "fallback": "syntheticSnv"},
]


class Opened:
    """A task on a corpus, prepared below ``folder``."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.folder = folder
        raw = training({"corpus": str(folder / "corpus"), **section})
        self.training = Training.model_validate(raw)
        self.task = cast(LatentEditTask, load_task(self.training, folder)[0])
        below = folder / "prepared"
        below.mkdir(exist_ok=True)
        facts = json.loads(json.dumps(dict(self.task.prepare(NO_TEXT, below))))
        self.facts: dict[str, Any] = facts
        self.prepared = Prepared(
            (),
            (),
            tokenizer_identity="",
            vocab_size=0,
            end_of_document=0,
            folder=below,
            facts=facts,
        )
        (self.stage,) = self.task.stages(self.prepared)

    @property
    def source(self) -> EditSource:
        return cast(EditSource, self.stage.sources["train"][0])

    def build(self) -> Modules:
        seed_generators(0, 0, 0, Purpose.INITIAL_WEIGHTS)
        return self.task.build(lambda: pytest.fail("the file's model is not trained"))

    def batch(self, *items: int) -> Mapping[str, Tensor]:
        return self.source.read(items).tensors


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path


@pytest.mark.capability("G-27", "G-73", "G-74", "G-78")
def test_cached_states_equal_the_states_computed_in_each_step(corpus: Path) -> None:
    kept, live = (
        Opened(corpus, mixture=MIXTURE, features=one) for one in ("cached", "live")
    )
    one, other = kept.build(), live.build()
    assert len(kept.source) == len(live.source) == 24
    losses = []
    for items in ((0, 1, 2, 3), (20, 7)):
        results = [
            opened.task.loss(modules, opened.batch(*items), opened.stage)
            for opened, modules in ((kept, one), (live, other))
        ]
        parts = [dict(result.parts) for result in results]
        parts[0].pop("mean_loss")
        assert torch.equal(results[0].total, results[1].total)
        assert parts[0].keys() == parts[1].keys() == set(kept.task.metrics) - {"mean_loss"}
        assert all(torch.equal(value, parts[1][name]) for name, value in parts[0].items())
        losses.append(results[0].total.item())
    assert losses[0] != losses[1]


@pytest.mark.capability("G-74", "G-X35")
def test_a_second_start_computes_nothing_and_another_split_only_new_states(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Opened(corpus)
    monkeypatch.setattr(Encoder, "build", lambda self: pytest.fail("it was encoded again"))
    assert Opened(corpus).facts == first.facts
    # Fewer items, all of them known to the cache by their content.
    Opened(corpus, mixture=[{"family": "population", "count": 2}])
    with pytest.raises(pytest.fail.Exception, match="it was encoded again"):
        Opened(corpus, encoder={"radius": 4})


@pytest.mark.parametrize("has_locks", [True, False])
def test_leftovers_of_killed_preparations_are_removed_by_the_next_one(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    first = Opened(corpus)
    below = corpus / "prepared"
    (states,) = below.glob("states-*")
    left = below / ".tmp-0123"
    left.mkdir()
    (left / "states.npy").write_bytes(b"half")
    (states / ".states-0123.tmp").write_bytes(b"half")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    # It may belong to any data: no process continues it.
    other = Opened(corpus, mixture=[{"family": "population", "count": 2}])
    assert left.exists() == (states / ".states-0123.tmp").exists() == (not has_locks)
    names = {path.name for path in below.iterdir()}
    kept = {states.name, first.facts["folder"], other.facts["folder"]}
    assert names - {left.name, ".lock"} == kept


@pytest.mark.capability("G-74", "G-X2", "G-X35")
def test_the_cache_key_contains_exactly_what_determines_a_state(corpus: Path) -> None:
    def identity(**changes: Any) -> str:
        raw = training({"encoder": {"radius": 3, **changes.pop("encoder", {})}}, **changes)
        settings = Training.model_validate(raw)
        return Encoder(Setup(settings, None, corpus)).identity

    base = identity()
    others = [
        identity(encoder={key: value})
        for key, value in {
            "radius": 2,
            "layer": 1,
            "normalize": False,
            "dtype": "bf16",
            "prefix": "<",
            "suffix": ">",
            "padTo": 6,
        }.items()
    ]
    others.append(identity(model={"config": {**ENCODER, "hidden_size": 32}}))
    others.append(identity(reproducibility={"seed": 1}))
    assert len({base, *others}) == 10
    assert (
        identity(
            horizon={"steps": 99}, batching={"globalBatchSize": 4, "microBatchSize": 2}
        )
        == base
    )


@pytest.mark.parametrize("later", [{"a_key_of_later": None}, {"hidden_act": "gelu"}])
def test_another_transformers_version_does_not_change_the_encoder_of_a_run_that_has_started(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, later: dict[str, Any]
) -> None:
    settings = Training.model_validate(training())
    run = RunDirectory(corpus / "run")
    run.create()

    def identity(of_run: bool = True) -> str:
        directory = run.path if of_run else None
        return Encoder(Setup(settings, None, corpus, directory)).identity

    began, real = identity(), ModelPlan.describe
    plan = plan_model(settings.model, base_directory=corpus, vocab_size=257)
    run.write_resolved({"model": real(plan)})
    assert identity() == began

    def describe(plan: ModelPlan) -> dict[str, Any]:
        found = real(plan)
        config = {**found["config"], **later}
        # One that the later version has no more.
        del config["pretraining_tp"]
        return {"transformers": "99.0", "config": config}

    monkeypatch.setattr(ModelPlan, "describe", describe)
    assert (identity() == began) == ("hidden_act" not in later)
    # A run of the later version computes its own states.
    assert identity(of_run=False) != began


@pytest.mark.parametrize(
    ("version", "edit", "is_kept"),
    [
        ("99.0", {}, True),
        ("99.0", {"later": 4}, False),
        # A third version may lack the key, and may have others.
        ("99.1", {"later": ..., "latest": 1}, True),
        ("99.1", {"later": 4}, False),
        # The first version had that key, the second has it not, and the third has another value.
        ("99.1", {"pretraining_tp": 7}, False),
    ],
)
def test_a_run_keeps_its_states_only_while_each_start_has_the_previous_encoder(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    edit: dict[str, Any],
    is_kept: bool,
) -> None:
    """A key that only a later version has is compared with the newest start that had it."""
    settings = Training.model_validate(training())
    run = RunDirectory(corpus / "run")
    run.create()
    plan = plan_model(settings.model, base_directory=corpus, vocab_size=257)
    first = plan.describe()
    began = Encoder(Setup(settings, None, corpus, run.path)).identity

    latest: dict[str, Any] = {**first["config"], "later": None}
    del latest["pretraining_tp"]
    model = {"transformers": "99.0", "config": latest}
    run.write_resolved({"model": model, "firstModel": first})
    config = {**latest, **edit}
    config = {key: value for key, value in config.items() if value is not ...}
    monkeypatch.setattr(
        ModelPlan, "describe", lambda _: {"transformers": version, "config": config}
    )
    identity = Encoder(Setup(settings, None, corpus, run.path)).identity
    assert (identity == began) == is_kept


@pytest.mark.capability("G-4", "G-73", "G-X1")
def test_the_weights_of_a_directory_are_part_of_the_encoder_and_may_be_pinned(
    corpus: Path,
) -> None:
    from evergrad_latent_edit.corpus import hash_file

    settings = Training.model_validate(training())
    plan = plan_model(settings.model, base_directory=corpus, vocab_size=257)
    build_model(plan, seed=3, precision="fp32").save_pretrained(corpus / "encoder")
    digest = hash_file(corpus / "encoder/model.safetensors")

    def encoder(pinned: str) -> Encoder:
        raw = training({"encoder": {"weightHash": pinned}}, model={"path": "encoder"})
        return Encoder(Setup(Training.model_validate(raw), None, corpus))

    assert encoder(f"sha256:{digest}").identity == encoder(digest).identity
    with pytest.raises(ModelError, match=r"encoder.weightHash: .* has the SHA-256"):
        _ = encoder("0" * 64).identity


@pytest.mark.acceptance("number-G-73")
@pytest.mark.capability("G-73")
def test_tokens_are_pooled_around_the_edit_and_inside_the_sequence(
    corpus: Path,
) -> None:
    raw = training(
        {"encoder": {"radius": 2, "prefix": "<d>", "suffix": "</d>", "padTo": 6}}
    )
    encoder = Encoder(Setup(Training.model_validate(raw), None, corpus))
    whole = encoder.tokenize(b"ACGTACGT", None)
    # Three letters, eight bases, four of filling, four letters.
    assert len(whole.ids) == 19 and (whole.first, whole.last) == (3, 11)
    spans = [encoder.tokenize(b"ACGTACGT", focus) for focus in (0, 4, 7)]
    assert [(one.first, one.last) for one in spans] == [(3, 6), (5, 10), (8, 11)]
    with pytest.raises(
        DataError, match=r"a window has 67 tokens; the encoder has 64 positions"
    ):
        encoder.tokenize(b"A" * 60, None)


@pytest.mark.acceptance("input-G-28")
@pytest.mark.capability("G-28")
def test_a_width_that_differs_from_the_encoder_is_refused(corpus: Path) -> None:
    with pytest.raises(
        DataError, match=r"stateWidth: 512 is not the width of a state; .* have 16"
    ):
        Opened(corpus, predictor={"stateWidth": 512})


@pytest.mark.acceptance("8d-11h:latent_edit")
@pytest.mark.capability("G-27", "G-82")
def test_the_encoder_gets_no_gradient_and_its_weights_stay_unchanged(corpus: Path) -> None:
    opened = Opened(corpus, features="live")
    modules = opened.build()
    before = {
        name: one.clone() for name, one in modules.frozen["encoder"].state_dict().items()
    }
    optimizer = torch.optim.AdamW(modules.root().parameters(), lr=0.1)
    for _ in range(2):
        opened.task.loss(modules, opened.batch(0, 1, 2), opened.stage).total.backward()
        optimizer.step()
    frozen = modules.frozen["encoder"]
    assert not frozen.training and all(one.grad is None for one in frozen.parameters())
    assert all(torch.equal(one, before[name]) for name, one in frozen.state_dict().items())
    assert not set(map(id, frozen.parameters())) & set(map(id, modules.root().parameters()))


@pytest.mark.acceptance("number-G-77")
@pytest.mark.capability("G-30", "G-77")
def test_the_initial_prediction_is_that_nothing_changes(corpus: Path) -> None:
    opened = Opened(corpus)
    modules = opened.build()
    loss = opened.task.loss(modules, opened.batch(*range(8)), opened.stage)
    assert loss.total.item() == pytest.approx(loss.parts["unchanged_loss"].item(), rel=1e-5)
    optimizer = torch.optim.Adam(modules.root().parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        opened.task.loss(modules, opened.batch(*range(8)), opened.stage).total.backward()
        optimizer.step()
    loss = opened.task.loss(modules, opened.batch(*range(8)), opened.stage)
    assert loss.total.item() < 0.5 * loss.parts["unchanged_loss"].item()


@pytest.mark.capability("G-X4", "G-X5")
def test_predictor_and_edit_encoder_have_the_sizes_of_the_manifest(corpus: Path) -> None:
    sizes = {"layers": 3, "heads": 2, "width": 8, "actionWidth": 6, "alleleWidth": 12}
    root = Opened(corpus, predictor=sizes).build().root()
    (predictor,) = (one for one in root.modules() if isinstance(one, Predictor))
    (actions,) = (one for one in root.modules() if isinstance(one, ActionEncoder))
    assert len(predictor.blocks) == 3
    assert {block.to_state.heads for block in predictor.blocks} == {2}
    assert predictor.order.shape == (16, 8), "so many edits of an item at most"
    assert predictor.action_in.weight.shape == (8, 6) and actions.padding.shape == (6,)
    assert actions.norm.weight.shape == (12,)
    assert {one.dtype for one in root.parameters()} == {torch.float32}


@pytest.mark.capability("G-77")
def test_a_prediction_depends_only_on_its_own_and_earlier_edits() -> None:
    torch.manual_seed(0)
    predictor = Predictor(state_width=8, action_width=4, width=8, layers=2, heads=2)
    torch.nn.init.normal_(predictor.out.weight)
    state, actions = torch.randn(2, 8), torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    whole = predictor(state, actions, mask, normalize=True)
    assert torch.all(whole[1, 1:] == 0)
    torch.testing.assert_close(whole.norm(dim=-1)[mask], torch.ones(4))
    changed = actions.clone()
    changed[0, 2] += 1
    other = predictor(state, changed, mask, normalize=True)
    torch.testing.assert_close(other[0, :2], whole[0, :2])
    assert not torch.allclose(other[0, 2], whole[0, 2])


@pytest.mark.capability("G-76", "G-X5")
def test_edits_are_encoded_by_position_type_and_bases_and_padding_is_one_learned_vector() -> (
    None
):
    found = mers_of(digits_of(np.array([[b"A"], [b"ACGTAC"], [b"T" * 16]], dtype="S16")))
    assert found[0, 0].tolist() == [sum(4 * 5**power for power in range(5)), NO_MER, NO_MER]
    first = ((((0 * 5 + 1) * 5 + 2) * 5 + 3) * 5 + 0) * 5 + 1
    assert found[1, 0].tolist() == [first, NO_MER, NO_MER]
    assert found[2, 0, 2] == sum(3 * 5**power for power in (5, 4, 3, 2)) + 4 * 5 + 4
    pairs = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3)]
    expected = [type_of(b"A" * before, b"C" * after) for before, after in pairs]
    assert types_of(*np.array(pairs).T).tolist() == expected
    torch.manual_seed(0)
    encoder = ActionEncoder(width=4, allele_width=8)
    torch.nn.init.ones_(encoder.padding)
    position, kind = torch.tensor([[3, 3, 4, 3]]), torch.tensor([[0, 1, 0, 0]])
    alleles = torch.full((1, 4, 3), NO_MER)
    mask = torch.tensor([[True, True, True, False]])
    read = encoder(position, kind, alleles, alleles, mask)
    assert torch.equal(read[0, 3], torch.ones(4))
    assert not torch.allclose(read[0, 0], read[0, 1])
    assert not torch.allclose(read[0, 0], read[0, 2])


@pytest.mark.capability("G-84", "G-X10", "G-X38")
def test_the_parts_of_an_evaluation_sum_to_the_numbers_of_the_whole_set(
    corpus: Path,
) -> None:
    opened = Opened(corpus, mixture=MIXTURE)
    modules = opened.build()
    with torch.no_grad():
        torch.nn.init.normal_(modules.trained["predictor"].out.weight, std=0.1)
    evaluator = opened.task.evaluators(opened.prepared)["test"]
    assert evaluator.measure is not None and evaluator.summarize is not None
    (source,) = evaluator.sources
    sums: dict[str, float] = {}
    weight = total = 0.0
    for items in ((0, 1, 2), (3, 4), (5, 6, 7)):
        rows = source.read(items)
        loss = evaluator.measure(modules, rows.tensors, opened.stage)
        assert [*loss.parts] == evaluator.parts
        weight, total = weight + rows.weight, total + loss.total.item()
        for name, value in loss.parts.items():
            sums[name] = sums.get(name, 0.0) + value.item()
    means = {name: value / weight for name, value in sums.items()}
    metrics = evaluator.summarize(means)
    assert evaluator.metrics is not None and metrics.keys() == evaluator.metrics.keys()

    batch = source.read(range(8)).tensors
    mask = batch["mask"]
    predicted = opened.task._predict(modules, batch, batch["state"]).detach()[mask].double()
    target = batch["target"][mask].double()
    stacked = np.corrcoef(predicted.flatten().numpy(), target.flatten().numpy())[0, 1]
    assert metrics["correlation"] == pytest.approx(stacked)
    for name, states in (("target_variance", target), ("prediction_variance", predicted)):
        assert metrics[name] == pytest.approx(
            states.var(0, correction=0).mean().item(), rel=1e-6
        )
    assert metrics["gain"] == pytest.approx(1 - total / weight / metrics["unchanged_loss"])


@pytest.mark.capability("G-15", "G-97", "G-95")
def test_the_record_names_the_corpus_and_no_local_path(
    corpus: Path,
) -> None:
    opened = Opened(corpus, holdOut={"records": ["w-chr1-1"]})
    text = json.dumps(opened.facts)
    assert str(corpus) not in text and "toy-snap-1" in text
    assert opened.facts["splits"]["heldOut"]["windows"] == 1
    assert opened.facts["splits"]["train"]["fallbacks"] == {"clinical>syntheticSnv": 2}
    copied = opened.prepared.folder / opened.facts["folder"] / "dataset_manifest.json"  # type: ignore[operator]
    assert copied.read_bytes() == (corpus / "corpus/dataset_manifest.json").read_bytes()
    assert opened.source.describe(0).startswith("placed/train.jsonl:1, population ")


def test_changed_content_of_the_corpus_is_another_source(corpus: Path) -> None:
    before = Opened(corpus).source.fingerprint
    rows = [
        json.loads(line)
        for line in (corpus / "corpus/gnomad/train.jsonl").read_text("utf-8").splitlines()
    ]
    rows[0]["alt"] = next(
        one for one in "ACGT" if one not in (rows[0]["ref"], rows[0]["alt"])
    )
    write_lines(corpus / "corpus/gnomad/train.jsonl", rows)
    seal(corpus / "corpus")
    assert Opened(corpus).source.fingerprint != before


def test_damaged_prepared_data_is_reported(corpus: Path) -> None:
    opened = Opened(corpus)
    folder = corpus / "prepared" / opened.facts["folder"]
    (folder / "states.npy").write_bytes(b"short")
    with pytest.raises(
        DataError, match=r"the prepared items are damaged; states.npy .* Delete"
    ):
        Opened(corpus)


@pytest.mark.parametrize("name", ["states.npy", "mean.npy", "items-*.npz", "facts.json"])
def test_a_changed_bit_in_prepared_data_is_detected_at_the_next_start(
    corpus: Path, name: str
) -> None:
    """By content: nodes compare the description of the folder, and train on its content."""
    opened = Opened(corpus)
    path = next((corpus / "prepared" / opened.facts["folder"]).glob(name))
    content = bytearray(path.read_bytes())
    # Of facts.json a digit of the manifest's hash, of the others a byte of what they hold.
    at = (
        content.index(b'"manifestHash": "') + 17
        if name == "facts.json"
        else len(content) // 2
    )
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"the prepared items are damaged; .*Delete"):
        Opened(corpus)


@pytest.mark.capability("G-74")
@pytest.mark.parametrize("damage", ["short", "empty", "bit"])
def test_a_damaged_cache_file_is_refused_and_recreated_after_its_deletion(
    corpus: Path, damage: str
) -> None:
    first = Opened(corpus)
    path = next((corpus / "prepared").glob("states-*/states-*.npz"))
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "short": content[:-40],
            "empty": b"",
            "bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        }[damage]
    )
    shutil.rmtree(corpus / "prepared" / first.facts["folder"])
    with pytest.raises(DataError, match=r"states-\w+.npz: cannot be read; .* Delete it"):
        Opened(corpus)
    path.unlink()
    assert Opened(corpus).facts == first.facts


@pytest.mark.capability("G-74")
def test_states_of_another_encoder_are_refused_wherever_they_were_copied(
    corpus: Path,
) -> None:
    first = Opened(corpus)
    path = next((corpus / "prepared").glob("states-*/states-*.npz"))
    other = FeatureCache(corpus / "prepared", "f" * 64)
    other.folder.mkdir()
    shutil.copy(path, other.folder)
    with pytest.raises(
        DataError, match=r"holds states of another encoder; its folder is of f"
    ):
        other.load([])
    assert FeatureCache(corpus / "prepared", first.facts["encoder"]).load([]) == {}


@pytest.mark.capability("G-74")
def test_a_kill_while_states_are_computed_loses_only_the_newest_states(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Opened(corpus)
    shutil.rmtree(corpus / "prepared")
    calls = 0

    def count_and_die(*args: Any, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == dies_at:
            raise KeyboardInterrupt
        return encode(*args, **options)

    monkeypatch.setattr(features, "encode", count_and_die)
    monkeypatch.setattr(features, "_STATES_A_FILE", 8)
    dies_at = 21
    with pytest.raises(KeyboardInterrupt):
        Opened(corpus)
    dies_at = -1
    again = Opened(corpus)
    assert again.facts == whole.facts
    # The states of the test split are encoded in the same pass.
    states = np.load(corpus / "prepared" / again.facts["folder"] / "states.npy")
    assert calls == 21 + len(states) - 16


def test_nodes_with_other_encoder_weights_are_not_peers_with_cached_or_live_states(
    corpus: Path,
) -> None:
    """The values that nodes compare depend on the states, or on the encoder that computes them in each
    step."""
    found = {
        Opened(
            corpus, features=features, encoder={"radius": 3, "layer": layer}
        ).source.fingerprint
        for features in ("cached", "live")
        for layer in (1, 2)
    }
    assert len(found) == 4


@pytest.mark.capability("G-X20")
def test_windows_in_two_sets_are_reported_at_every_start(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        json.loads(line)
        for line in (corpus / "corpus/placed/train.jsonl").read_text("utf-8").splitlines()
    ]
    lines = [*rows[1:], {**rows[1], "record_id": "again"}]
    write_lines(corpus / "corpus/placed/train.jsonl", [rows[0], *lines])
    seal(corpus / "corpus")
    for _ in range(2):
        opened = Opened(corpus, holdOut={"records": ["again"]})
        assert opened.facts["leaks"] == {"heldOut": {"sameSequence": 1, "overlapping": 1}}
        said = capsys.readouterr().err
        assert (
            "warning: heldOut: of 1 windows 1 have the sequence of, 1 overlap one" in said
        )


def test_another_number_of_tokens_is_refused_if_states_are_recomputed(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = Encoder.tokenize

    def shorter(self: Encoder, sequence: bytes, focus: int | None) -> Any:
        return tokenize(self, sequence[: len(sequence) - sequence.count(b"A")], focus)

    monkeypatch.setattr(Encoder, "tokenize", shorter)
    with pytest.raises(
        DataError, match=r"latentEdit.features: windows have \d+ to \d+ tokens"
    ):
        Opened(corpus, mixture=[{"family": "syntheticSnv"}], features="live")
