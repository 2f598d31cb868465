"""Settings of the server whose pages follow streams: the project's, and two pages more."""

from __future__ import annotations

from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.browser.live_urls"

# Soon enough for a test: by default a minute.
ECHOMQ = {"AUTHORIZE_INTERVAL": 2.0}
