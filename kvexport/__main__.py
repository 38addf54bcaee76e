"""`python -m kvexport` is `kvexport`."""

from kvexport.commands.app import main

if __name__ == "__main__":
    main()
