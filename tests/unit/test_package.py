import subprocess
import sys

import inferq


def test_the_public_names_are_listed_before_they_are_loaded() -> None:
    assert dir(inferq) == sorted(inferq.__all__)


def test_listing_them_loads_nothing() -> None:
    code = "import sys, inferq; dir(inferq); assert 'inferq.client' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
