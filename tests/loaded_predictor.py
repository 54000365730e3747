"""A scene of serving_faults.py, which is loaded as Cog loads a predictor: before torch, it is among the modules."""

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("serving_faults", Path(__file__).with_name("serving_faults.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = predictor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(predictor)
    predictor.main()
