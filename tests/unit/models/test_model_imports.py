"""What importing transformers reads."""

import subprocess
import sys

_COUNT_SOURCES = """
import sys
from evergrad_trainer.models.imports import import_transformers
import_transformers()
opened = []
def note(event, arguments):
    path = str(arguments[0]) if event == "open" and arguments else ""
    if "/transformers/models/" in path and path.endswith(".py"):
        opened.append(path)
sys.addaudithook(note)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM
import transformers
assert transformers.LlamaForCausalLM is LlamaForCausalLM
assert transformers.models.gpt2.GPT2Config().model_type == "gpt2"
print(len(opened))
"""


def test_the_sources_of_all_models_are_not_read_a_second_time() -> None:
    # In a process of its own: this one has imported transformers.
    ended = subprocess.run(
        [sys.executable, "-c", _COUNT_SOURCES],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 100, "transformers has some 2,000 files of models"
