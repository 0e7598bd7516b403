"""`python -m streamloader` is the command `streamloader`, also where that is not on the PATH."""

from streamloader.cli.main import main

if __name__ == "__main__":
    main()
