"""Where the relative paths of a recorded manifest start, also behind links."""

from pathlib import Path

from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import BASE, describe_base, read_base


def make_link(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A folder of files, the run directory reached through a link next to it, and the target of the link."""
    base, real = tmp_path / "project", tmp_path / "volume" / "disk" / "runs"
    (real / "tiny").mkdir(parents=True)
    base.mkdir()
    (tmp_path / "runs").symlink_to(real)
    return base, tmp_path / "runs" / "tiny", real / "tiny"


def test_relative_paths_of_a_run_behind_a_link_start_at_its_manifest(
    tmp_path: Path,
) -> None:
    base, by_link, real = make_link(tmp_path)
    record = {BASE: describe_base(base, by_link)}
    assert record == {BASE: "../../../../project"} == {BASE: describe_base(base, real)}
    for path in (by_link, real):
        found = read_base(RunDirectory(path), record)
        assert found.resolve() == base.resolve()


def test_a_base_directory_that_an_older_version_recorded_through_links_is_found(
    tmp_path: Path,
) -> None:
    base, by_link, real = make_link(tmp_path)
    found = read_base(RunDirectory(by_link), {BASE: "../../project"})
    assert found == base
    # A missing file is searched for, and missed, at the recorded path.
    gone = read_base(RunDirectory(by_link), {BASE: "../../gone"})
    assert gone == by_link / "../../gone"
    assert read_base(RunDirectory(real), {BASE: "/gone"}) == Path("/gone")
