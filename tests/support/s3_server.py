"""An S3 API server on a free port of the loopback, which it prints. Its data is in memory."""

from __future__ import annotations

import logging
import sys

from moto.server import create_backend_app
from werkzeug.serving import make_server

if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", int(sys.argv[1]), create_backend_app("s3"), threaded=True)
    print(server.port, flush=True)
    server.serve_forever()
