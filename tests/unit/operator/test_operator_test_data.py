"""The runs for the tests of Argo CD's scripts are written by the operator."""

from run_samples import ARGO, render_test_data


def test_argo_cd_test_data_match_what_the_operator_writes() -> None:
    expected = dict(render_test_data())
    found = {
        path.relative_to(ARGO).as_posix(): path.read_text("utf-8")
        for path in (*ARGO.glob("testdata/*"), *ARGO.glob("actions/testdata/*"))
    }
    assert found == expected, "make generate writes them anew"
