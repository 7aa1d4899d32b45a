"""Loads images into running nodes. A node receives only the layers that it does not have."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bed import boxes, golden, images, node
from bed.places import NODES, Node, work


def load(items: Sequence[str | Path]) -> None:
    """Load images by name, or archives by path, into every running node.

    Images by name are also kept for later beds: immediately if no bed is up, otherwise when the next bed
    starts. A path is either a result of `images.archive`, which counts as a name, or a tar of an image, which
    is loaded only into the running nodes.
    """
    running = [entry for entry in NODES if boxes.is_up(entry.name)]
    for item in items:
        begun = time.monotonic()
        with ThreadPoolExecutor(len(NODES)) as pool:
            if isinstance(item, Path) and item.is_file():
                sent = list(
                    pool.map(
                        lambda entry, file=item: _import(entry, file, keep=True), running
                    )
                )
            else:
                layout = images.want(
                    item if isinstance(item, str) else (item / "name").read_text()
                )
                sent = list(
                    pool.map(lambda entry, layout=layout: _send(entry, layout), running)
                )
        where = ", ".join(entry.name for entry in running) or "no node (the bed is not up)"
        size = max(sent, default=0) / 1e6
        print(
            f"{time.strftime('%T')}  {item}: {size:.1f} MB to {where} in {time.monotonic() - begun:.1f} s",
            flush=True,
        )
    if not running:
        golden.root()


def _send(entry: Node, layout: Path) -> int:
    held = set(node.ctr(entry, "content", "ls", "--quiet").split())
    archive = work() / entry.name / f"import-{time.monotonic_ns()}.tar"
    images.pack(layout, held, archive)
    return _import(entry, archive, keep=False)


def _import(entry: Node, archive: Path, *, keep: bool) -> int:
    try:
        node.ctr(entry, "images", "import", "--snapshotter", "overlayfs", archive.resolve())
        return archive.stat().st_size
    finally:
        if not keep:
            archive.unlink()
