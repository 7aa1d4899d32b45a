"""The files that an import of transformers reads."""

import subprocess
import sys

import pytest
from patience import PATIENCE

_COUNT_SOURCES = """
import sys
opened = []
def note(event, arguments):
    path = str(arguments[0]) if event == "open" and arguments else ""
    if "/transformers/models/" in path and path.endswith(".py"):
        opened.append(path)
sys.addaudithook(note)
from evergrad_trainer.models.imports import import_transformers
import_transformers()
"""


def _run(code: str) -> int:
    """Return the number of model sources that were read, in a separate process, because this process has
    imported transformers."""
    ended = subprocess.run(
        [sys.executable, "-c", _COUNT_SOURCES + code + "\nprint(len(opened))"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.split()[-1])


def test_building_a_model_from_a_configuration_imports_no_other_models() -> None:
    num_sources = _run("""
from pathlib import Path
from evergrad_manifest.training import Model
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.preflight.memory import model_facts
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
settings = Model(config={"model_type": "llama", **sizes})
plan = plan_model(settings, base_directory=Path(), vocab_size=32)
model = build_model(plan, seed=1, precision="fp32")
assert type(model).__name__ == "LlamaForCausalLM"
assert model_facts(plan).parameters == sum(one.numel() for one in model.parameters())
""")
    assert num_sources < 100, "transformers has some 2,000 files of models"


@pytest.mark.long
def test_a_name_in_no_other_list_is_found_in_the_list_of_all_models() -> None:
    _run("""
import pickle
import transformers
from transformers import BertModel, GPT2Config, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
assert transformers.LlamaForCausalLM is LlamaForCausalLM
assert transformers.models.gpt2.GPT2Config is GPT2Config
assert transformers.models.bert.BertModel is BertModel
assert not hasattr(transformers, "NoSuchClass")
assert not hasattr(transformers.models, "no_such_model")
""")


@pytest.mark.long
def test_all_names_are_available_if_all_are_requested() -> None:
    _run("""
import importlib
import transformers
late, late_models = set(transformers.__all__), set(transformers.models.__all__)
assert {"BertModel", "AutoConfig", "PreTrainedModel", "models"} <= late <= set(dir(transformers))
# As transformers lists them itself.
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
plain = importlib.import_module("transformers")
assert type(plain).__name__ == "_LazyModule"
assert set(plain.__all__) == late
assert set(plain.models.__all__) == late_models
""")


@pytest.mark.long
def test_sources_are_read_once_for_both_lists() -> None:
    num_sources = _run("""
import transformers
assert transformers.BertModel and transformers.models.gpt2.GPT2Config
""")
    assert num_sources < 4_000, "transformers has some 2,500 files of models"


@pytest.mark.long
def test_importing_a_submodule_of_transformers_reads_no_model_sources() -> None:
    # `from . import initialization`, as modeling_utils begins, asks the package for the name first.
    assert _run("import transformers.modeling_utils") < 100
