"""In place of cog-openai-clip's package of this name, which sends bills."""


def record_billing_metric(name: str, value: float) -> None:
    """Do nothing."""
