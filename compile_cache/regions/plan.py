"""The plan of a boot: it orders the calls that stored artifacts name in their headers, before a request makes them.

This module imports torch's compiler. It runs on a thread beside the predictions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from compile_cache.aot.call_inputs import make_call
from compile_cache.aot.describe import class_name, is_inference, structure, structure_digest
from compile_cache.aot.known_calls import KnownCall
from compile_cache.regions.region import Region
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")


def order_known(regions: Iterable[Region], calls: Iterable[KnownCall], settings: Settings) -> int:
    """Order each call that was compiled for a region of the same structure. Returns how many were ordered."""
    instances = {
        (class_name(type(module)), structure_digest(structure(module))): (region, module)
        for region in regions
        for module in region.stored.instances()
    }
    count = 0
    for call in calls:
        found = instances.get((call.class_name, call.structure))
        # For one graph of many sizes (None), the sizes that it was made from are compiled.
        is_ours = call.mode == settings.mode and call.dynamic in (settings.dynamic, None)
        if found and is_ours and call.call is not None:
            count += _order(*found, call)
    log.info("plan.ordered calls=%d", count)
    return count


def _order(region: Region, module: nn.Module, call: KnownCall) -> bool:
    """Order one call, if its inputs can be made; whether it was ordered."""
    try:
        with torch.no_grad(), torch.inference_mode(is_inference(call.switches)):
            args, kwargs = make_call(call.call)
            return region.ordering.order_ahead(module, args, kwargs)
    except (ValueError, RuntimeError) as error:  # the inputs do not fit the module, or no memory is left
        log.info("plan.not_made class=%s error=%s", call.class_name, error)
        return False
