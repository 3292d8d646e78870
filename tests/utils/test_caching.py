"""Constants that are computed on a thread of their own."""

import subprocess
import sys

SCRIPT = """
import threading
from fusedlayers.utils.caching import in_clean_state

def work():
    threading.main_thread().join()
    print(in_clean_state(lambda: "made")())

threading.Thread(target=work).start()
"""


def test_constants_are_made_after_the_main_threads_end() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("made\n", 0), run.stderr
