"""What the server may load."""

import subprocess
import sys


def test_the_server_loads_neither_torch_nor_an_engine():
    program = (
        "import sys, moeless.server\n"
        "heavy = {'torch', 'transformers', 'moeless.engines'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
