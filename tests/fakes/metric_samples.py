"""What Prometheus would read, by name and by the labels that are not the process's own."""

from prometheus_client.parser import text_string_to_metric_families

OWN = ("model_name", "role")


def samples(text: bytes) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = sorted(f"{name}={value}" for name, value in sample.labels.items() if name not in OWN)
            found[sample.name, ",".join(labels)] = sample.value
    return found
