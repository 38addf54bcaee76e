"""`python -m kvexport` is `kvexport`."""

from kvexport.cli import main

if __name__ == "__main__":
    main()
