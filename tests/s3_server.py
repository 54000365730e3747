"""moto's S3 server, with one answer at a time: moto closes an object's bytes while another thread still reads them. It
lists 50 objects at a time, where S3 lists a thousand.

python tests/s3_server.py -H HOST -p PORT
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto import server, settings
from werkzeug.wsgi import get_input_stream


class OneAtATime(server.DomainDispatcherApplication):
    """Waits for a request's content, so that a slow client holds no other up, and then for the answer before it."""

    _answering = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        content = get_input_stream(environ).read()
        environ |= {"wsgi.input": io.BytesIO(content), "CONTENT_LENGTH": str(len(content))}
        with self._answering:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    server.DomainDispatcherApplication = OneAtATime
    settings.get_s3_default_max_keys = lambda: 50
    server.main()
