"""Which of torch's AdamW variants on the CPU give the same bits however a tensor is cut, on however many
threads, and how fast.

    python tools/benchmarks/adamw_cuts.py

Measured with torch 2.13 on a processor with AVX-512 (3 updates of 1,000,003 elements, 3,000,009 results a
row):

=========  ===============  ===========  =================  ====================
variant    1 or 2 threads   cut 1, 8, 21  cut in rows of 777  whole, against loop
=========  ===============  ===========  =================  ====================
loop       0                0             0                   0
foreach    0                0             0                   0
fused      0                4             388                 71
in parts   0                0             0                   71
=========  ===============  ===========  =================  ====================

``in parts`` is ``evergrad_trainer.optim.parts``: the fused kernel, whose bits runs have had so far, for any
cut.
"""

import time

import torch

from evergrad_trainer.optim.parts import TensorPart, update_parts

ELEMENTS = 1_000_003
CUTS = {
    "whole": [ELEMENTS],
    "1, 8, 21": [1, 7, 13, ELEMENTS - 21],
    "rows of 777": [777] * (ELEMENTS // 777) + [ELEMENTS % 777],
}
UPDATES = 3


def update(
    variant: str, weights: torch.Tensor, gradients: list[torch.Tensor], cut: list[int]
) -> list[torch.Tensor]:
    """Weights and moments after the updates, each as one flat tensor."""
    state = [weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)]
    pieces = [list(tensor.split(cut)) for tensor in state]
    begins = [sum(cut[:index]) for index in range(len(cut))]
    parameters = [torch.nn.Parameter(piece) for piece in pieces[0]]
    options = (
        {"fused": True}
        if variant == "fused"
        else {"foreach": variant == "foreach", "fused": False}
    )
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options
    )
    for parameter, average, square in zip(parameters, pieces[1], pieces[2], strict=True):
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": average,
            "exp_avg_sq": square,
        }
    for done, gradient in enumerate(gradients):
        cut_gradient = gradient.split(cut)
        if variant == "in parts":
            cuts = zip(
                pieces[0],
                cut_gradient,
                pieces[1],
                pieces[2],
                begins,
                strict=True,
            )
            parts = [
                TensorPart(*four, begin=begin, total=ELEMENTS) for *four, begin in cuts
            ]
            update_parts(
                parts,
                updates=done,
                learning_rate=1e-3,
                betas=(0.9, 0.95),
                epsilon=1e-8,
                weight_decay=0.1,
            )
            continue
        for parameter, piece in zip(parameters, cut_gradient, strict=True):
            parameter.grad = piece
        optimizer.step()
    return state


def main() -> None:
    """Print one line per variant, number of threads and cut."""
    torch.manual_seed(0)
    weights, gradients = (
        torch.randn(ELEMENTS),
        [torch.randn(ELEMENTS) * 0.01 for _ in range(UPDATES)],
    )
    plain = update("loop", weights, gradients, [ELEMENTS])
    for variant in ("loop", "foreach", "fused", "in parts"):
        torch.set_num_threads(1)
        first = update(variant, weights, gradients, [ELEMENTS])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, cut in CUTS.items():
                begun = time.perf_counter()
                found = update(variant, weights, gradients, cut)
                seconds = time.perf_counter() - begun
                differ = sum(
                    int((one != other).sum())
                    for one, other in zip(first, found, strict=True)
                )
                to_loop = sum(
                    int((one != other).sum())
                    for one, other in zip(plain, found, strict=True)
                )
                print(
                    f"{variant:9} threads={threads} cut={name:12} differ={differ:4} "
                    f"from_loop={to_loop:4} {seconds * 1e3:.0f} ms"
                )


if __name__ == "__main__":
    main()
