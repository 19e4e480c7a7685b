from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_tokenizer import build_tokenizer

TOKENIZER = """
from tandem.runtime.no_torch import keep_torch_out
keep_torch_out()
from tandem.text.tokenizer import Tokenizer
tokenizer = Tokenizer(FOLDER)
assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}], {}, "")) == "<s><user>hi"
"""
COMMAND = """
from tandem.cli.main import main
sys.argv = ["tandem", "version"]
try:
    main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("code", [TOKENIZER, COMMAND], ids=["tokenizer", "command"])
def test_torch_is_not_imported_and_no_warning_is_printed(tmp_path: Path, code: str) -> None:
    code = f"import sys; FOLDER = {str(build_tokenizer(tmp_path))!r}\n{code}\nassert sys.modules['torch'] is None"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert (result.returncode, result.stderr) == (0, "")
