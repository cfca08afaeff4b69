"""What a command is: its options (`options`), its arguments and parser (`command`), the tables of a configuration that
a command line gives (`layers`), its help (`screen`), and how shells complete it (`shells`). The table of all commands
is `cli.parser`. Imports config and errors, and nothing large.
"""
