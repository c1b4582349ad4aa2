"""The embedded pair as GGUF: the checkpoints' weights, in files beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specdec.pair import PAIR_GGUF_NAMES, pair_path

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

TEXT = 'def area(r):\n    """The area of a circle."""\n    return math.pi * r ** 2\n\n\nclass A:\n'


@pytest.mark.parametrize("name", PAIR_GGUF_NAMES)
def test_logits_equal_the_checkpoints(name: str) -> None:
    torch = pytest.importorskip("torch")
    from gguf_logits import gguf_logits
    from transformers import AutoModelForCausalLM

    from specdec.text.gguf_tokenizer import GgufTokenizer

    path = pair_path(name)
    with GgufTokenizer(path) as tokenizer:
        ids = tokenizer.encode(TEXT)
    folder = pair_path(name.removesuffix(".gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(gguf_logits(path, ids), expected, atol=1e-2 * expected.std())


@pytest.mark.slow
def test_the_files_are_made_from_the_checkpoints(tmp_path: Path) -> None:
    """A newly trained pair needs new files: `python -m tests.helpers.pair_gguf`."""
    from pair_gguf import write_pair

    for made in write_pair(tmp_path):
        new, ours = (gguf.GGUFReader(path) for path in (made, pair_path(f"pair:{made.name}")))
        assert contents(new) == contents(ours)
        tensors, expected = ({t.name: t for t in reader.tensors} for reader in (new, ours))
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.tensor_type == expected[name].tensor_type
            np.testing.assert_array_equal(tensor.data, expected[name].data, name)


def contents(reader: gguf.GGUFReader) -> dict[str, object]:
    return {name: field.contents() for name, field in reader.fields.items()}


def test_norms_are_f32_and_the_head_is_tied() -> None:
    reader = gguf.GGUFReader(pair_path("pair:target.gguf"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert "output.weight" not in types
    assert all((kind == "F32") == ("norm" in name) for name, kind in types.items())
    assert reader.fields["llama.attention.key_length"].contents() == 128
    assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def test_the_tokenizer_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from specdec.pair import pair_path\n"
        "from specdec.text.gguf_tokenizer import GgufTokenizer\n"
        "GgufTokenizer(pair_path('pair:draft.gguf')).encode('a b')\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
