"""The commands of the command line program `kvexport`, one file each."""
