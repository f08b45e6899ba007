"""``python -m moeless`` is the command ``moeless``."""

from moeless.cli.main import main

if __name__ == "__main__":
    main()
