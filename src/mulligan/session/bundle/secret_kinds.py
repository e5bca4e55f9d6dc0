"""The shapes of secrets: one table of named kinds.

A kind is a pattern, the literals without which it cannot match (so that most texts cost a few substring looks), and
sometimes a judge who takes a second look at what the pattern found. Where only a part of what matches is the secret,
the pattern names that part `secret`. Rules that hold for every row:

- Run time grows no faster than the text: a repeat is possessive or bounded, and a pattern starts with a literal.
- A kind with a distinctive prefix is found whatever stands before it, because commands (`-pghp_…`), names
  (`TOKEN_ghp_…`) and colour codes touch secrets. A kind with a weak prefix is found where a word begins, or if it
  could be nothing else than a random key.
- A word may begin right after an escape (`\\n`, `\\u0022`, `%3D`), because JSON and URLs travel inside strings.
- What a redaction leaves behind matches no kind, so redacting twice changes nothing.

`heuristic` kinds judge by the words around a value. They redact, but finding one does not stop an export.

`VENDOR_KEYS` lists the keys of further services: a name, a pattern that begins with a literal, and the literal as hint.

Only data; `secret_kinds` says what the columns mean and which rules hold for every row. What these find must also mix
letters and digits, because some of the prefixes are short.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable
from dataclasses import dataclass

_BASE64URL = "[A-Za-z0-9_-]"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_END = r"(?![A-Za-z0-9])"

VENDOR_KEYS: tuple[tuple[str, str, str], ...] = (
    ("adobe_key", r"p8e-[A-Za-z0-9]{32}", "p8e-"),
    ("airtable_token", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}", "pat"),
    ("alibaba_key_id", rf"LTAI[A-Za-z0-9]{{16,26}}{_END}", "ltai"),
    ("artifactory_token", r"(?:AKCp[A-Za-z0-9]{60,80}+|cmVmdGtuOj[A-Za-z0-9]{40,80}+)", "akcp cmvmdgtuoj"),
    ("brevo_key", r"xkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}", "xkeysib-"),
    ("browserbase_key", r"bb_(?:live|test)_[A-Za-z0-9_-]{20,64}+", "bb_live_ bb_test_"),
    ("buildkite_token", r"bk(?:ua|aj|ct)_[A-Za-z0-9]{32,64}", "bkua_ bkaj_ bkct_"),
    ("circleci_token", r"CCI(?:PAT|PRJ)_[A-Za-z0-9]{16,32}+_[0-9a-f]{40}", "ccipat_ cciprj_"),
    ("clojars_token", r"CLOJARS_[0-9a-f]{60}", "clojars_"),
    ("cloudflare_origin_key", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{100,200}+", "v1.0-"),
    ("contentful_token", rf"CFPAT-{_BASE64URL}{{43}}", "cfpat-"),
    ("dropbox_token", rf"sl\.(?:u\.)?{_BASE64URL}{{120,2048}}+", "sl."),
    ("dynatrace_token", r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}", "dt0"),
    ("easypost_key", r"EZ[AT]K[A-Za-z0-9]{54}", "ezak eztk"),
    ("elevenlabs_key", r"sk_[0-9a-f]{48}", "sk_"),
    ("facebook_token", r"EAA[A-Za-z0-9]{40,512}+", "eaa"),
    ("firecrawl_key", rf"fc-[0-9a-f]{{32}}{_END}", "fc-"),
    ("fireworks_key", rf"fw_[A-Za-z0-9]{{22,32}}{_END}", "fw_"),
    ("flutterwave_key", r"FLWSECK(?:_TEST)?-[0-9a-f]{12,40}+-X", "flwseck"),
    ("frameio_token", rf"fio-u-{_BASE64URL}{{64}}", "fio-u-"),
    ("hubspot_token", rf"pat-(?:na|eu|ap)\d-{_UUID}", "pat-na pat-eu pat-ap"),
    ("infracost_key", r"ico-[A-Za-z0-9]{32}", "ico-"),
    ("lob_key", rf"(?:live|test)_[0-9a-f]{{35}}{_END}", "live_ test_"),
    ("mapbox_token", rf"sk\.eyJ{_BASE64URL}{{20,200}}+\.{_BASE64URL}{{20,40}}+", "sk.eyj"),
    ("neon_key", r"napi_[A-Za-z0-9]{48,80}+", "napi_"),
    ("nvidia_key", rf"nvapi-{_BASE64URL}{{40,128}}+", "nvapi-"),
    ("plaid_token", rf"(?:access|public)-(?:sandbox|development|production)-{_UUID}", "access- public-"),
    ("posthog_key", r"ph[xr]_[A-Za-z0-9]{40,64}+", "phx_ phr_"),
    ("prefect_key", r"pn[ub]_[A-Za-z0-9]{36}", "pnu_ pnb_"),
    ("pulumi_token", r"pul-[0-9a-f]{40}", "pul-"),
    ("readme_key", r"rdme_[a-z0-9]{70}", "rdme_"),
    ("resend_key", rf"re_[A-Za-z0-9]{{8}}_[A-Za-z0-9]{{24}}{_END}", "re_"),
    ("shippo_token", r"shippo_(?:live|test)_[0-9a-f]{40}", "shippo_"),
    ("sonar_token", rf"sq[pua]_[0-9a-f]{{40}}{_END}", "sqp_ squ_ sqa_"),
    ("square_token", rf"sq0[a-z]{{3}}-{_BASE64URL}{{22,64}}+", "sq0"),
    ("tavily_key", r"tvly-(?:dev-|prod-)?[A-Za-z0-9_-]{28,64}+", "tvly-"),
    ("telnyx_key", rf"KEY0[0-9A-F]{{31}}_{_BASE64URL}{{20,32}}+", "key0"),
    ("typeform_token", rf"tfp_{_BASE64URL}{{40,80}}+", "tfp_"),
    ("vercel_token", r"vc[pioakr]_[A-Za-z0-9]{24,80}+", "vcp_ vci_ vco_ vca_ vck_ vcr_"),
    ("voyage_key", rf"pa-{_BASE64URL}{{43}}(?!{_BASE64URL})", "pa-"),
    ("yandex_key", rf"AQVN{_BASE64URL}{{34,40}}+", "aqvn"),
    ("zuplo_key", r"zpka_[A-Za-z0-9]{32}_[0-9a-f]{8}", "zpka_"),
)


Judge = Callable[[re.Match[str]], bool]

# Where a word may begin in text that may itself be the inside of a JSON string or a URL.
START = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4})|(?<=%[0-9A-Fa-f]{2}))"

_PLACEHOLDER = re.compile(
    r"<|\[redacted\]|\[withheld\]|\$|%\(|\{\{|\*{3}|x{4,}|\.{3}"
    r"|(?:none|null|nil|true|false|undefined|string|str|bytes|int|bool|any|optional|required|changeme|example|env|file"
    r"|secret|token|password)(?![A-Za-z0-9_-])"
    # Code that reads the value from elsewhere.
    r"|(?:process|self|this|os|config|settings|args|options)(?:[.\[(]|$)",
    re.IGNORECASE,
)
_DIGIT, _LETTER, _UPPER, _LOWER = (re.compile(one) for one in ("[0-9]", "[A-Za-z]", "[A-Z]", "[a-z]"))
_RUN = re.compile("[A-Za-z0-9]+")
_WORD_START = re.compile(START)
_CODE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+;?")
_GITLAB = re.compile("gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct|wt)-")
_ABOUT_A_SECRET = re.compile(
    r"(?:^|[_.-])(?:count|type|name|names|id|ids|url|uri|path|file|policy|length|len|limit|size|budget|ttl|expir\w*|version"
    r"|field|header|prefix|suffix|format|usage|threshold|env|var|arn|ref|handle|index|at|max|min|details?)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, eq=False)
class SecretKind:
    """One row. `hints` are in lower case; a text without any of them cannot hold the kind."""

    name: str
    pattern: re.Pattern[str]
    hints: tuple[str, ...]
    judge: Judge | None = None
    heuristic: bool = False
    # May be longer than a window overlaps; such a pattern is run over the whole text at once.
    unbounded: bool = False


def span_of(found: re.Match[str]) -> tuple[int, int]:
    """The span of the secret itself."""
    return found.span("secret") if "secret" in found.re.groupindex else found.span()


def secret_of(found: re.Match[str]) -> str:
    start, end = span_of(found)
    return found.string[start:end]


def looks_random(text: str, *, least: int = 16) -> bool:
    """Whether it is long and mixes letters with digits, as words, numbers and sentences do not."""
    return len(text) >= least and _DIGIT.search(text) is not None and _LETTER.search(text) is not None


def _mixed(found: re.Match[str]) -> bool:
    """Whether it has digits among letters, and upper case unless it is long, as names that people choose do not."""
    return _is_mixed(secret_of(found).partition("-")[2] or secret_of(found))


def _mixed_all(found: re.Match[str]) -> bool:
    """As `_mixed`, for keys that may contain a dash."""
    return _is_mixed(secret_of(found))


def _is_mixed(text: str) -> bool:
    return looks_random(text) and (_UPPER.search(text) is not None or len(text) >= 32)


def _is_gitlab(found: re.Match[str]) -> bool:
    """GitLab's own prefixes need no digit after them: one key in thirty has none."""
    key = secret_of(found).partition("-")[2]
    is_own = _GITLAB.match(secret_of(found)) is not None
    return _is_mixed(key) or (is_own and _UPPER.search(key) is not None and _LOWER.search(key) is not None)


def _assigned(found: re.Match[str]) -> bool:
    """Whether a value is assigned to a name like `db_password`, and is not a type, variable or placeholder."""
    value, name = secret_of(found), found["name"]
    if _PLACEHOLDER.match(value) or _ABOUT_A_SECRET.search(found["rest"]):
        return False
    is_quoted = found["quote"] is not None
    if not is_quoted and (found.string[found.end() : found.end() + 1] in ("(", "[") or _CODE.fullmatch(value)):
        return False
    if name.lower().endswith("token"):
        return looks_random(value, least=8) or (is_quoted and len(value) >= 16 and " " not in value)
    return len(value) >= 4


def _is_userinfo(found: re.Match[str]) -> bool:
    user, colon, password = secret_of(found).partition(":")
    return bool(password) if colon else looks_random(user, least=20)


def _is_pair(found: re.Match[str]) -> bool:
    """Basic credentials are the base64 of `user:password`."""
    text = secret_of(found)
    try:
        plain = b64decode(text + "=" * (-len(text) % 4), validate=True).decode("utf-8")
    except (NotBase64, UnicodeDecodeError):
        return False
    return ":" in plain and plain.isprintable()


def _is_discord(found: re.Match[str]) -> bool:
    """A bot token begins with the base64 of the bot's number."""
    head = found[0].partition(".")[0]
    try:
        return b64decode(head + "=" * (-len(head) % 4)).decode("ascii").isdigit()
    except (NotBase64, UnicodeDecodeError):
        return False


def _is_header(found: re.Match[str]) -> bool:
    value = secret_of(found)
    return not _PLACEHOLDER.match(value) and (looks_random(value, least=8) or len(value) >= 24)


def _is_query_secret(found: re.Match[str]) -> bool:
    value = secret_of(found)
    return not _PLACEHOLDER.match(value) and (found["weak"] is None or looks_random(value, least=12))


def _has_pairs(found: re.Match[str]) -> bool:
    return "=" in secret_of(found) and not secret_of(found).startswith("<redacted")


def _real(found: re.Match[str]) -> bool:
    return not _PLACEHOLDER.match(secret_of(found))


def _kind(name: str, pattern: str, hints: str, judge: Judge | None = None, *, heuristic: bool = False) -> SecretKind:
    return SecretKind(name, re.compile(pattern), tuple(hints.split()), judge, heuristic)


def _prefixed(name: str, pattern: str, hints: str, judge: Judge | None = None) -> SecretKind:
    """A kind that is known by how it begins, whatever stands before it."""
    return _kind(name, pattern, hints, judge)


def _weakly_prefixed(name: str, pattern: str, hints: str, judge: Judge | None = None) -> SecretKind:
    """A kind whose prefix is a part of ordinary words too (`task-list` holds `sk-`)."""

    def judged(found: re.Match[str]) -> bool:
        if judge is not None and not judge(found):
            return False
        return _WORD_START.match(found.string, found.start()) is not None or _is_random_key(secret_of(found))

    return _kind(name, pattern, hints, judged)


def _is_random_key(text: str) -> bool:
    """Whether one run in it is long and mixes digits and letters of both cases, or is very long and mixes some.

    Names that people choose do not.
    """
    run = max(_RUN.findall(text), key=len, default="")
    needed = (_DIGIT, _LETTER) if len(run) >= 40 else (_DIGIT, _UPPER, _LOWER)
    return len(run) >= 20 and all(one.search(run) for one in needed)


def _is_distinctive(hints: str) -> bool:
    return all(len(hint) >= 5 or _DIGIT.search(hint) for hint in hints.split())


_PEM_GAP = r"(?:\s|\\++[nrt]|\\*+[\"'+,])"
_PEM = (
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:[^-]|-(?!----))*+-----END [A-Z0-9 ]{0,40}-----"
    # Cut off before its end: as many lines of base64 as there are.
    rf"|(?:{_PEM_GAP}*+[A-Za-z0-9+/=]{{16,}}+)*+(?:{_PEM_GAP}++[A-Za-z0-9+/=]{{1,15}}(?![A-Za-z0-9]))?)"
)
_PUTTY = r"PuTTY-User-Key-File-\d:[\s\S]{0,400}?Private-Lines:(?P<secret>[^:]{1,8000}+(?::[^:]{1,200})?)"
_B64U = "[A-Za-z0-9_-]"

BY_SHAPE: tuple[SecretKind, ...] = (
    SecretKind("pem_private_key", re.compile(_PEM), ("-----begin ",), unbounded=True),
    SecretKind("putty_private_key", re.compile(_PUTTY), ("putty-user-key-file-",), unbounded=True),
    # From the start of its run, so that no run is read twice: a run may hold `eyJ` many times.
    _kind(
        "jwt",
        rf"(?<!{_B64U})(?:(?!eyJ){_B64U})*+"
        rf"(?P<secret>eyJ{_B64U}{{8,}}+\.{_B64U}{{8,}}+\.{_B64U}{{8,}}+(?:\.{_B64U}++)*+)",
        "eyj",
    ),
    _prefixed("github_fine_grained", r"github_pat_[A-Za-z0-9_]{30,255}+", "github_pat_"),
    _prefixed("github_token", r"gh[pousr]_[A-Za-z0-9_]{30,512}+", "ghp_ gho_ ghu_ ghs_ ghr_"),
    _prefixed("gitlab_token", rf"gl(?:[a-z]{{2,6}}|agent)-{_B64U}[A-Za-z0-9_.-]{{19,300}}+", "gl", _is_gitlab),
    _prefixed("slack_token", rf"(?:xoxe\.)?xox[a-z]-{_B64U}{{10,512}}+", "xox"),
    _prefixed("slack_app_token", rf"xapp-\d-{_B64U}{{10,512}}+", "xapp-"),
    _kind("slack_webhook", r"hooks\.slack\.com(?:/|\\/)(?P<secret>[A-Za-z0-9_\\/+-]{20,512}+)", "hooks.slack.com"),
    _prefixed("aws_access_key_id", r"A(?:KI|SI|BI|CC)A[A-Z0-9]{16}", "akia asia abia acca"),
    _prefixed(
        "aws_secret_key",
        r"A(?:KI|SI)A[A-Z0-9]{16}[^A-Za-z0-9/+]{1,40}(?P<secret>[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))",
        "akia asia",
    ),
    _prefixed("huggingface_token", r"(?:hf|api_org)_[A-Za-z0-9]{30,255}+", "hf_ api_org_"),
    _prefixed("google_api_key", rf"AIza{_B64U}{{35,60}}+", "aiza"),
    _prefixed("google_oauth_token", rf"(?:ya29\.|1//0|GOCSPX-){_B64U}[A-Za-z0-9_.-]{{20,2048}}+", "ya29. 1//0 gocspx-"),
    _prefixed("npm_token", r"npm_[A-Za-z0-9]{36,255}+", "npm_"),
    _prefixed("pypi_token", rf"pypi-AgE{_B64U}{{40,1024}}+", "pypi-age"),
    _prefixed("anthropic_key", rf"sk-ant-{_B64U}{{20,512}}+", "sk-ant-"),
    _prefixed(
        "openai_project_key",
        rf"sk-(?:proj|svcacct|admin)-{_B64U}{{20,512}}+",
        "sk-proj- sk-svcacct- sk-admin-",
        _mixed,
    ),
    _weakly_prefixed("openai_key", rf"sk-{_B64U}{{20,512}}+", "sk-", _mixed),
    _prefixed("stripe_key", r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,512}+", "_live_ _test_"),
    _prefixed("stripe_webhook_secret", r"whsec_[A-Za-z0-9+/=]{24,512}+", "whsec_"),
    _weakly_prefixed("twilio_key", r"SK[0-9a-f]{32}(?![A-Za-z0-9])", "sk"),
    _weakly_prefixed("sendgrid_key", rf"SG\.{_B64U}{{16,64}}+\.{_B64U}{{32,128}}+", "sg."),
    _prefixed("azure_client_secret", r"[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,40}+", "q~", _mixed_all),
    _kind(
        "azure_account_key",
        r"(?i:AccountKey|SharedAccessKey)=(?P<secret>[A-Za-z0-9+/]{40,128}+=*+)",
        "accesskey= accountkey=",
    ),
    _prefixed("digitalocean_token", r"do[opr]_v1_[a-f0-9]{64}", "_v1_"),
    _prefixed("telegram_token", rf"\d{{8,10}}:AA{_B64U}{{33,64}}+", ":aa", _mixed_all),
    _weakly_prefixed("discord_token", rf"[MNO]{_B64U}{{22,28}}\.{_B64U}{{6}}\.{_B64U}{{27,64}}+", ".", _is_discord),
    _kind(
        "discord_webhook", rf"discord(?:app)?\.com/api/webhooks/(?P<secret>\d++/{_B64U}{{40,128}}+)", "/api/webhooks/"
    ),
    _prefixed("heroku_key", rf"HRKU-{_B64U}{{30,128}}+", "hrku-"),
    _prefixed("age_key", r"AGE-(?:SECRET-KEY|PLUGIN-[A-Z0-9]{1,40})-1[0-9A-Z]{40,512}+", "age-"),
    _prefixed("databricks_token", r"dapi[a-f0-9]{32}(?:-\d)?", "dapi"),
    _prefixed("vault_token", rf"hv[sbr]\.{_B64U}{{24,512}}+", "hvs. hvb. hvr."),
    _prefixed("doppler_token", r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9._-]{40,128}+", "dp."),
    _prefixed("shopify_token", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}", "shp"),
    _weakly_prefixed("mailgun_key", r"key-[0-9a-f]{32}(?![A-Za-z0-9])", "key-"),
    _weakly_prefixed("mailchimp_key", r"[0-9a-f]{32}-us\d{1,2}(?![A-Za-z0-9])", "-us"),
    _prefixed("linear_key", r"lin_(?:api|oauth)_[A-Za-z0-9]{32,128}+", "lin_"),
    _prefixed("notion_token", r"(?:ntn_|secret_)[A-Za-z0-9]{40,64}+(?!_)", "ntn_ secret_", _mixed),
    _prefixed("figma_token", rf"fig[duo]r?_{_B64U}{{30,128}}+", "fig", _mixed_all),
    _prefixed("postman_key", r"PMAK-[a-f0-9]{24}-[a-f0-9]{34}", "pmak-"),
    _prefixed("sentry_token", r"sntry[su]_[A-Za-z0-9+/=_-]{40,512}+", "sntrys_ sntryu_"),
    _prefixed("new_relic_key", r"NRAK-[A-Z0-9]{27}", "nrak-"),
    _prefixed("grafana_token", r"gl(?:sa|c)_[A-Za-z0-9+/=_-]{32,512}+", "glsa_ glc_"),
    _prefixed("docker_token", rf"dckr_(?:pat|oat)_{_B64U}{{20,128}}+", "dckr_"),
    _prefixed("rubygems_key", r"rubygems_[a-f0-9]{48}", "rubygems_"),
    _weakly_prefixed("crates_token", r"cio[A-Za-z0-9]{32}(?![A-Za-z0-9_])", "cio", _mixed),
    _prefixed("terraform_token", rf"[A-Za-z0-9]{{14}}\.atlasv1\.{_B64U}{{40,128}}+", ".atlasv1."),
    _prefixed("planetscale_token", rf"pscale_(?:tkn|pw|oauth)_{_B64U}{{30,128}}+", "pscale_"),
    _prefixed("supabase_key", rf"sb(?:p_|_secret_){_B64U}{{20,128}}+", "sbp_ sb_secret_", _mixed_all),
    _prefixed("atlassian_token", r"AT(?:ATT|CTT|BB)[A-Za-z0-9_=-]{24,512}+", "atatt atctt atbb", _mixed_all),
    _prefixed("tailscale_key", rf"tskey-[a-z]{{3,12}}-{_B64U}{{12,128}}+", "tskey-"),
    _prefixed("fly_token", r"(?:fo1_|fm[12][ra]?_)[A-Za-z0-9+/=_,-]{40,4096}+", "fo1_ fm1 fm2"),
    _prefixed("netlify_token", rf"nfp_{_B64U}{{30,128}}+", "nfp_"),
    _prefixed("groq_key", r"gsk_[A-Za-z0-9]{40,128}+", "gsk_"),
    _prefixed("xai_key", r"xai-[A-Za-z0-9]{40,128}+", "xai-", _mixed),
    _prefixed("perplexity_key", r"pplx-[A-Za-z0-9]{32,128}+", "pplx-", _mixed),
    _prefixed("replicate_token", r"r8_[A-Za-z0-9]{30,64}+", "r8_", _mixed),
    _prefixed("cerebras_key", r"csk-[A-Za-z0-9]{32,128}+", "csk-", _mixed),
    _prefixed("together_key", rf"tgp_v1_{_B64U}{{32,128}}+", "tgp_v1_"),
    _prefixed("langsmith_key", r"lsv2_(?:pt|sk)_[A-Za-z0-9_]{32,128}+", "lsv2_"),
    _prefixed("onepassword_token", rf"ops_eyJ{_B64U}{{40,4096}}+=*+", "ops_eyj"),
    _prefixed("mulligan_token", rf"mlg_{_B64U}{{43,128}}+", "mlg_"),
    *(
        (_prefixed if _is_distinctive(hints) else _weakly_prefixed)(name, pattern, hints, _mixed_all)
        for name, pattern, hints in VENDOR_KEYS
    ),
    _kind(
        "teams_webhook", r"\.webhook\.office\.com(?:/|\\/)(?P<secret>[A-Za-z0-9@_\\/-]{40,512}+)", "webhook.office.com"
    ),
    _kind(
        "database_url",
        r"(?i:postgres(?:ql)?|mysql|mariadb|mongodb|rediss?|amqps?|mssql|sqlserver|clickhouse|cockroachdb|oracle|snowflake)"
        r"(?:\+\w{1,20})?://(?P<secret>[^\s/?#\"'<>\\]{1,512})@",
        "://",
        _is_userinfo,
    ),
    _kind("url_userinfo", r"://(?P<secret>[^\s/?#\"'<>\\]{1,512})@", "://", _is_userinfo),
)

_NAMES = (
    r"(?P<name>(?i:pass(?:word|wd|phrase|code)|pwd|secret|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key"
    r"|(?:storage|encryption|signing|master|deploy|license|auth|client|service|session|webhook)[_-]key|credentials?"
    r"|connection[_-]?string|token(?!(?i:i[sz]|s|ed))))"
)
_ASSIGNED = _NAMES + r"(?P<rest>[A-Za-z0-9_.-]{0,40}+)(?:\\*+[\"'`]\]?)?[ \t]{0,8}(?:=>|:=|[=:])[ \t]{0,8}"
_TYPED = _NAMES + r"(?P<rest>[A-Za-z0-9_]{0,40}+)\??:[ \t]{0,4}&?[A-Za-z][A-Za-z0-9_.&' ]{0,30}+=[ \t]{0,4}"
_STRONG_QUERY = (
    r"(?i:(?:access|refresh|id|oauth|auth|session|bearer|security)[_-]?token|token|api[_-]?key|client[_-]secret|secret"
    r"|passw(?:or)?d|pwd|x-amz-(?:signature|security-token|credential)|x-goog-(?:signature|credential)|signature)"
)
_WEAK_QUERY = r"(?P<weak>(?i:key|auth|sig|code|session(?:id)?|sid|jwt|state|pass|hmac))"


_ASSIGNED_HINTS = "pass pwd secret key credential string token"


def _assignment(name: str, value: str) -> SecretKind:
    return _kind(name, _ASSIGNED + value, _ASSIGNED_HINTS, _assigned, heuristic=True)


_QUOTED = r"(?P<quote>\\*+[\"'`])(?P<secret>(?:(?!(?P=quote))[^\n\r]){1,2048})"
_BARE = r"(?P<quote>(?!))?(?P<secret>[^\s\"'`,;&<>(){}\[\]\\|]{4,512})"

BY_CONTEXT: tuple[SecretKind, ...] = (
    _kind(
        "authorization_header",
        r"(?i:authorization)(?:\\*+[\"'`])?[ \t]{0,4}[:=][ \t]{0,4}(?:\\*+[\"'`])?"
        r"(?:(?i:bearer|token|negotiate|apikey)[ \t]{1,4})?(?P<secret>[^\n\r\"'`\\<]{4,4096})",
        "authorization",
        _is_header,
        heuristic=True,
    ),
    _kind(
        "bearer_token",
        r"(?i:bearer)[ \t]{1,4}(?P<secret>[A-Za-z0-9._~+/=-]{8,4096}+)",
        "bearer",
        _is_header,
        heuristic=True,
    ),
    _kind(
        "basic_credentials",
        r"(?i:basic)[ \t]{1,4}(?P<secret>[A-Za-z0-9+/]{8,1024}+={0,2})",
        "basic",
        _is_pair,
        heuristic=True,
    ),
    _kind(
        "cookie",
        r"(?i:(?:set-)?cookie)(?:\\*+[\"'`])?[ \t]{0,4}[:=][ \t]{0,4}(?:\\*+[\"'`])?(?P<secret>[^\n\r\"'`\\]{3,4096})",
        "cookie",
        _has_pairs,
        heuristic=True,
    ),
    _kind(
        "url_query",
        rf"(?:[?&;]|%26|%3F|\\u0026)(?:{_STRONG_QUERY}|{_WEAK_QUERY})(?:=|%3D)(?P<secret>[^&?#\s\"'<>\\`]{{4,4096}})",
        "?  & ; %26 %3f",
        _is_query_secret,
        heuristic=True,
    ),
    _assignment("assignment", _QUOTED),
    _kind("assignment", _TYPED + _QUOTED, _ASSIGNED_HINTS, _assigned, heuristic=True),
    _assignment("assignment", _BARE),
    _kind(
        "environment_variable",
        r"(?:PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(?P<rest>[A-Z0-9_]{0,40}+)="
        r"(?P<secret>[^\s\"'<>\\]{4,2048})",
        "password passwd passphrase secret token key",
        lambda found: _real(found) and not _ABOUT_A_SECRET.search(found["rest"]),
        heuristic=True,
    ),
    _kind(
        "environment_key",
        r"_(?:KEY|PASS|PAT|AUTH|CREDENTIALS?|DSN|SALT)=[\"']?(?P<secret>[^\s\"'<>\\]{8,2048})",
        "_key= _pass= _pat= _auth= _credential _dsn= _salt=",
        lambda found: looks_random(secret_of(found), least=8) and _real(found),
        heuristic=True,
    ),
    _kind(
        "command_flag",
        r"--(?i:[a-z]{0,20}-?(?:password|passwd|token|secret|api-?key))[ \t]{1,4}\\*+[\"']?"
        r"(?P<secret>[^\s\"'<>\\-][^\s\"'<>\\]{3,1024})",
        "--",
        _real,
        heuristic=True,
    ),
    _kind(
        "command_user",
        r"(?i:curl|http|wget)[^\n]{0,400}?[ \t](?:-u|--user)[ \t=]{1,4}\\*+[\"']?"
        r"(?P<secret>[^\s\"':<>\\]{1,128}:[^\s\"'<>\\]{1,256})",
        "-u --user",
        _real,
        heuristic=True,
    ),
    _kind(
        "command_password",
        r"(?:(?:mysql|mariadb)[^\n]{0,200}?[ \t]-p|(?:sshpass|(?:docker|podman) login)[^\n]{0,200}?[ \t]-p[ \t]{1,4}"
        r"|redis-cli[^\n]{0,200}?[ \t]-a[ \t]{1,4}|-pass(?:in|out)?[ \t]{1,4}pass:)\\*+[\"']?"
        r"(?P<secret>[^\s\"'<>\\$-][^\s\"'<>\\]{3,256})",
        "mysql mariadb sshpass login redis-cli pass:",
        _real,
        heuristic=True,
    ),
    _kind(
        "sql_password",
        r"(?i:password|identified[ \t]{1,4}by)[ \t]{1,4}\\*+'(?P<secret>[^'\s\\<][^'\n\r\\]{3,256})\\*+'",
        "password identified",
        _real,
        heuristic=True,
    ),
    _kind(
        "spoken_password",
        r"(?i:pass(?:word|phrase|code)?|pwd|secret|token|api[ _-]?key)[ \t]{1,2}(?i:is|was)[ \t:]{1,3}\\*+[\"'`]?"
        r"(?P<secret>[^\s\"'`<>\\]{8,256})",
        "pass pwd secret token key",
        lambda found: _real(found) and looks_random(secret_of(found), least=8),
        heuristic=True,
    ),
    _kind(
        "digest_response",
        r"(?i:digest)[ \t]{1,4}[^\n]{0,400}?response=\\*+\"?(?P<secret>[0-9a-f]{32,128}+)",
        "digest",
        heuristic=True,
    ),
    _kind(
        "npmrc_auth",
        r"(?<![A-Za-z0-9])_auth[ \t]{0,2}=[ \t]{0,2}\\*+[\"']?(?P<secret>[A-Za-z0-9+/]{8,1024}+={0,2})",
        "_auth",
        _is_pair,
        heuristic=True,
    ),
    _kind(
        "seed_phrase",
        r"(?i:mnemonic|(?:seed|recovery)[ _-]?phrase)(?:\\*+[\"'`])?[ \t]{0,4}[:=][ \t]{0,4}\\*+[\"'`]?"
        r"(?P<secret>[a-z]{3,8}(?: [a-z]{3,8}){11,23}+)",
        "mnemonic phrase",
        heuristic=True,
    ),
    _kind(
        "netrc",
        r"(?i:login)\s{1,8}\S{1,128}\s{1,8}(?i:password)\s{1,8}(?P<secret>[^\s<]\S{0,256})",
        "login",
        heuristic=True,
    ),
    _kind(
        "xml_element",
        r"<[\w:.-]{0,40}(?i:password|passwd|secret|token|api-?key|private-?key)>(?P<secret>[^<]{3,2048})</",
        "</",
        _real,
        heuristic=True,
    ),
)

SECRET_KINDS: tuple[SecretKind, ...] = BY_SHAPE + BY_CONTEXT
BLOCKING_KINDS: tuple[SecretKind, ...] = BY_SHAPE
