"""The entry point of `python -m kvexport`, which is the same as the command `kvexport`."""

from kvexport.commands.app import main

if __name__ == "__main__":
    main()
