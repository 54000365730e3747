"""What a call is: its description, its copy in this process, and its bytes for another. Imports no compiler."""
