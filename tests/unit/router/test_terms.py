import pytest

from router.request_terms import RequestTerms, TermsParser
from tandem.config.router import ClassSpec
from tandem.errors import InputError
from tandem.testing.models import FakeClock

CLASSES = (ClassSpec(name="interactive"), ClassSpec(name="batch", batch=True))

NO_HEADERS: dict[str, str] = {}


def parser() -> TermsParser:
    return TermsParser(CLASSES, FakeClock(100.0))


def test_without_headers_the_first_class_and_no_deadline() -> None:
    assert parser().parse(NO_HEADERS.get) == RequestTerms("interactive", "", None)


def test_the_earlier_of_header_and_transport_deadline_counts() -> None:
    headers = {"x-tandem-priority": "batch", "x-tandem-tenant": "a.b:c@d-1_", "x-request-timeout-s": "2.5"}
    assert parser().parse(headers.get) == RequestTerms("batch", "a.b:c@d-1_", 102.5)
    assert parser().parse(headers.get, 1.0) == RequestTerms("batch", "a.b:c@d-1_", 101.0)
    assert parser().parse(headers.get, 3.0) == RequestTerms("batch", "a.b:c@d-1_", 102.5)
    assert parser().parse(NO_HEADERS.get, 0.0).deadline_s == 100.0


def test_a_transport_that_waits_for_ever_waits_a_day() -> None:
    assert parser().parse(NO_HEADERS.get, 1e12).deadline_s == 100.0 + 86_400


@pytest.mark.parametrize("text", ["1", "0.5", ".5", "1.", "86400", "000000001"])
def test_accepted_timeouts(text: str) -> None:
    assert parser().parse({"x-request-timeout-s": text}.get).deadline_s == 100.0 + float(text)


@pytest.mark.parametrize(
    "text", ["", "0", ".", "0.0", "-1", "+1", "1e3", "nan", "inf", "1_0", "٣", "86400.1", "9" * 400]
)
def test_refused_timeouts(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parser().parse({"x-request-timeout-s": text}.get)
    assert caught.value.field == "x-request-timeout-s"
    assert len(caught.value.message) < 200
