"""A server that is started like vLLM's and answers like `fake_openai`: an engine for tests of managed engines.

`managed.engine_python` makes the "Python" that runs it. `--fake-*` flags make it misbehave.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

METRICS = """\
vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="512"} 1
vllm:iteration_tokens_total_count{engine="0"} 7
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--fake-error", default="", help="end with this line while it starts")
    parser.add_argument("--fake-deaf", action="store_true", help="ignore SIGTERM")
    settings, _ = parser.parse_known_args()
    if settings.fake_error:
        print("some line before it")
        print(settings.fake_error, flush=True)
        return 3
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine process
    from tests.support.fake_openai import fake_openai

    with fake_openai(settings.port) as fake:
        fake.model, fake.metrics = settings.served_model_name, METRICS
        fake.key = os.environ.get("VLLM_API_KEY", "")
        print(f"serving {fake.model} at {fake.url} beside {child.pid}", flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if settings.fake_deaf else lambda *_: ended.set())
        while not ended.wait(0.5):
            pass
    child.kill()
    child.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
