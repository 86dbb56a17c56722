"""Values of the chart that nobody chose: all that the schema takes is valid, or refused by name."""

import re

import pytest

pytest.importorskip("helm_python")
pytest.importorskip("kubernetes_validate")

import helm_python as helm
from fixtures.deploy import chart
from fixtures.deploy.drawn import NEEDED, UNKNOWN, VALUES, WRONG, nested
from hypothesis import given, settings

# What the templates refuse beyond the schema: fields that do not go together.
OWN = re.compile(
    r"execution error at \(slipstream/templates/\w+\.yaml:\d+:\d+\): "
    r".*(drainSeconds|persistentVolumeClaim|inferencePool\.endpointPicker|tensor x pipeline|"
    r"tensor is|autoscaling\.replicas\.minimum)"
)


@pytest.mark.rest
@settings(max_examples=60)
@given(VALUES)
def test_what_the_schema_takes_is_valid_or_refused_by_name(values: chart.Object) -> None:
    refusal, objects = "", {}
    try:
        objects = chart.render(values)
    except helm.HelmRenderError as error:
        refusal = str(error)
    assert not refusal or OWN.search(refusal), refusal
    for found in objects.values():
        chart.validate(found, "1.33")


@given(WRONG)
def test_a_wrong_value_is_refused_by_its_path(wrong: tuple[str, chart.Object]) -> None:
    path, values = wrong
    with pytest.raises(helm.HelmValuesError, match=re.escape("at '/" + path.replace(".", "/"))):
        chart.render(values)


@given(UNKNOWN)
def test_an_unknown_field_is_refused_by_its_name(path: str) -> None:
    with pytest.raises(helm.HelmValuesError, match="nosuch"):
        chart.render(nested(path, 1))


@pytest.mark.parametrize("path", NEEDED)
def test_a_field_that_templates_need_may_not_be_null(path: str) -> None:
    """As `helm install --set FIELD=null` has it, which takes the default away."""
    with pytest.raises(helm.HelmError, match=path.rsplit(".", 1)[-1]):
        chart.render(nested(path, None))
