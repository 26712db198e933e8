import pytest

from kvcache.layout import KVLayout

LAYOUT = KVLayout("smol", "float32", block_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64)


def test_a_block_holds_keys_and_values_of_all_layers():
    assert LAYOUT.shape == (30, 2, 3, 16, 64)
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 4
    assert KVLayout("m", "bfloat16", 1, 1, 1, 1).block_bytes == 4


def test_the_fingerprint_names_every_fact_as_text():
    assert LAYOUT.fingerprint() == {
        "model": "smol",
        "dtype": "float32",
        "block_tokens": "16",
        "num_layers": "30",
        "num_kv_heads": "3",
        "head_dim": "64",
        "order": "layer,kv,head,token,dim",
    }


@pytest.mark.parametrize("field", ["block_tokens", "num_layers", "num_kv_heads", "head_dim"])
def test_sizes_are_at_least_one(field):
    sizes = {"block_tokens": 1, "num_layers": 1, "num_kv_heads": 1, "head_dim": 1} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, not 0"):
        KVLayout("m", "float32", **sizes)


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="float8"):
        KVLayout("m", "float8", 1, 1, 1, 1)
