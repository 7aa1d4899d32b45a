"""The example that writes objects of fields as documents."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[3] / "examples" / "documents" / "write_documents.py"
MOLECULE: dict[str, Any] = {
    "CID": 12,
    "SMILES": "CCO",
    "QED": 0.407,
    "RINGCOUNT": 0,
    "synonyms": [],
    "note": None,
    "related": [{"SMILES": f"C{number}", "similarity": 0.617} for number in range(12)],
}


def write(folder: Path, rows: list[Any], *arguments: str) -> list[str]:
    """The texts that the program writes of some rows."""
    spec = importlib.util.spec_from_file_location("write_documents", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "in.jsonl").write_text(lines, "utf-8")
    module.main(
        [str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl"), *arguments]
    )
    written = (folder / "out.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in written]


@pytest.mark.acceptance("number-C-58")
@pytest.mark.capability("C-58")
def test_fields_are_tagged_rounded_shortened_and_omitted(tmp_path: Path) -> None:
    [text] = write(tmp_path, [MOLECULE])
    for part in (
        "[CID]12[/CID]",
        "[SMILES]CCO[/SMILES]",
        "[QED]0.41[/QED]",
        "[RINGCOUNT]0[/RINGCOUNT]",
    ):
        assert part in text
    assert text.count("[RELATED]") == 10 and "[RELATED]C0 0.62[/RELATED]" in text
    assert "SYNONYMS" not in text and "NOTE" not in text


@pytest.mark.capability("C-58")
def test_drawn_documents_depend_only_on_seed_pass_and_content(tmp_path: Path) -> None:
    others = [{**MOLECULE, "CID": number} for number in range(200)]
    texts = write(tmp_path, others)
    # Neither neighbouring lines nor a string around the object change a document.
    assert write(tmp_path, [json.dumps(others[7])]) == texts[7:8]
    assert write(tmp_path, others[:3], "--seed", "1") != texts[:3]
    twice = write(tmp_path, others[:3], "--passes", "2")
    assert twice[:3] == texts[:3] and twice[3:] != texts[:3]
    assert [sorted(text) for text in twice[3:]] == [sorted(text) for text in texts[:3]]

    # Half of the time, and now and then by the shuffle of its 14 places.
    first = sum(text.startswith("[SMILES]") for text in texts)
    assert 80 < first < 140


@pytest.mark.capability("C-7", "C-59")
def test_an_assay_is_split_into_documents_with_its_description(
    tmp_path: Path,
) -> None:
    values = [{"SMILES": "C" * 9, "value": 1.0 + number} for number in range(30)]
    row = {"description": "binding", "values": values}
    texts = write(tmp_path, [row], "--type", "assay", "--longest", "200")
    assert len(texts) > 3
    assert all(text.startswith("[ASSAY]binding[/ASSAY][VALUE]") for text in texts)
    assert max(map(len, texts)) <= 200
    assert sum(text.count("[VALUE]") for text in texts) == 30


@pytest.mark.parametrize(
    ("row", "kind", "said"),
    [([1], "computed", "any field"), (MOLECULE, "assay", "description and values")],
)
def test_a_line_without_the_expected_object_is_reported(
    tmp_path: Path, row: Any, kind: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=f"is not an object with {said}"):
        write(tmp_path, [row], "--type", kind)


@pytest.mark.acceptance("input-C-7", "input-2e-11")
@pytest.mark.capability("C-7")
def test_an_unknown_type_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.jsonl").write_text("kept", "utf-8")
    # Words of types are compared in one way: as they are written.
    with pytest.raises(SystemExit) as ended:
        write(tmp_path, [MOLECULE], "--type", "Assay")
    assert ended.value.code == 64
    assert capsys.readouterr().err == (
        "error: --type: 'Assay' is not one of computed, assay. Write one of them.\n"
    )
    assert (tmp_path / "out.jsonl").read_text("utf-8") == "kept"
