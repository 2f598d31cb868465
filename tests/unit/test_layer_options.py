"""Wrong configuration is refused when the layer is made, with a word on what is right."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from echomq_app import checks
from echomq_app.layers import EchoChannelLayer
from echomq_app.layers.options import LayerOptions


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"buffer_size": 0}, "'buffer_size' has to be a whole number of at least 1, not 0"),
        ({"pool_size": 0}, "pool_size"),
        ({"max_batch": 1.5}, "max_batch"),
        ({"capacity": 0}, "capacity"),
        ({"buffer_size": True}, "buffer_size"),
        ({"call_timeout": 0}, "above 0"),
        ({"batch_interval": -1}, "0 or more"),
        ({"heartbeat_interval": "5"}, "heartbeat_interval"),
        ({"forget_after": 10}, "at least three times heartbeat_interval"),
        ({"concurrent_flush": 1}, "True or False"),
        ({"node": "with space"}, "node"),
        ({"transport": 5}, "an alias in CHANNEL_LAYERS"),
        ({"transport": {"CONFIG": {}}}, "an alias in CHANNEL_LAYERS"),
        (
            {"transport": {"BACKEND": "echomq_app.layers.EchoChannelLayer"}},
            "not an EchoChannelLayer",
        ),
        ({"bufer_size": 5}, "no option 'bufer_size'. Did you mean 'buffer_size'"),
        ({"hosts": []}, "Known: transport"),
        ({"transport": "nowhere"}, "no such alias; it has 'default'"),
    ],
)
def test_wrong_options(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=says):
        EchoChannelLayer(**config)


def test_no_interval_is_a_value() -> None:
    assert LayerOptions.from_config({"batch_interval": 0}).batch_interval == 0


def test_an_alias_is_looked_up() -> None:
    redis = {"BACKEND": "channels_redis.core.RedisChannelLayer", "CONFIG": {"hosts": ["x"]}}
    with override_settings(CHANNEL_LAYERS={"redis": redis}):
        assert LayerOptions.from_config({"transport": "redis"}).transport_settings() == redis


def test_the_system_check_finds_a_wrong_layer() -> None:
    wrong = {"BACKEND": "echomq_app.layers.EchoChannelLayer", "CONFIG": {"buffer_size": 0}}
    missing = {**wrong, "CONFIG": {"transport": "nowhere"}}
    nowhere = {
        **wrong,
        "CONFIG": {"transport": {"BACKEND": "channels.layers.InMemoryChannelLayer"}},
    }
    fine = {"BACKEND": "echomq_app.layers.EchoChannelLayer"}
    layers = {"default": wrong, "missing": missing, "memory": nowhere, "fine": fine}
    with override_settings(CHANNEL_LAYERS=layers):
        found = list(checks.check_echo_layers())
    assert [message.id for message in found] == ["echomq.E008", "echomq.E008", "echomq.W006"]
    assert "'default'" in found[0].msg
    assert "buffer_size" in found[0].msg


def test_a_node_has_a_name_that_tells_where_it_is() -> None:
    assert LayerOptions().node_name() == LayerOptions().node_name()
    assert LayerOptions(node="web.1").node_name() == "web.1"
