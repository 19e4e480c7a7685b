"""Converts a GGUF file to a transformers folder in bfloat16: `python -m tandem.cluster.gguf_convert FILE FOLDER`.

The model store runs it as a program of its own. It needs the `worker` extra, and about 1 GB of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, target: Path) -> None:
    """Write config, tokenizer and safetensors of `gguf` into the existing folder `target`."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as exc:
        raise SystemExit(f"{exc.name} is not installed; install the extra: pip install 'tandem-serve[worker]'") from exc

    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
