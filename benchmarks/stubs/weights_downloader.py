"""In place of cog-phi-2's module of this name."""


class WeightsDownloader:
    """The weights are there."""

    @staticmethod
    def download_if_not_exists(url: str, path: str) -> None:
        """Do nothing."""
