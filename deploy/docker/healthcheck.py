"""The images' HEALTHCHECK: exits 0 if TANDEM_HEALTH_URL returns 200 within 3 s."""

import os
import sys
import urllib.request

URL = os.environ.get("TANDEM_HEALTH_URL", "http://127.0.0.1:8000/health")

try:
    with urllib.request.urlopen(URL, timeout=3) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"{URL}: {error}")
