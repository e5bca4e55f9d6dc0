"""How further services write their keys: a name, a pattern that begins with a literal, and that literal as a hint.

Only data; `secret_kinds` says what the columns mean and which rules hold for every row. What these find must also mix
letters and digits, because some of the prefixes are short.
"""

from __future__ import annotations

_B64U = "[A-Za-z0-9_-]"
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_END = r"(?![A-Za-z0-9])"

VENDOR_KEYS: tuple[tuple[str, str, str], ...] = (
    ("adobe_key", rf"p8e-[A-Za-z0-9]{{32}}{_END}", "p8e-"),
    ("airtable_token", rf"pat[A-Za-z0-9]{{14}}\.[0-9a-f]{{64}}{_END}", "pat"),
    ("alibaba_key_id", rf"LTAI[A-Za-z0-9]{{16,26}}{_END}", "ltai"),
    ("artifactory_token", r"(?:AKCp[A-Za-z0-9]{60,80}+|cmVmdGtuOj[A-Za-z0-9]{40,80}+)", "akcp cmvmdgtuoj"),
    ("brevo_key", rf"xkeysib-[0-9a-f]{{64}}-[A-Za-z0-9]{{16}}{_END}", "xkeysib-"),
    ("browserbase_key", r"bb_(?:live|test)_[A-Za-z0-9_-]{20,64}+", "bb_live_ bb_test_"),
    ("buildkite_token", rf"bk(?:ua|aj|ct)_[A-Za-z0-9]{{32,64}}{_END}", "bkua_ bkaj_ bkct_"),
    ("circleci_token", r"CCI(?:PAT|PRJ)_[A-Za-z0-9]{16,32}+_[0-9a-f]{40}", "ccipat_ cciprj_"),
    ("clojars_token", r"CLOJARS_[0-9a-f]{60}", "clojars_"),
    ("cloudflare_origin_key", r"v1\.0-[0-9a-f]{24}-[0-9a-f]{100,200}+", "v1.0-"),
    ("contentful_token", rf"CFPAT-{_B64U}{{43}}", "cfpat-"),
    ("dropbox_token", rf"sl\.(?:u\.)?{_B64U}{{120,2048}}+", "sl."),
    ("dynatrace_token", r"dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}", "dt0"),
    ("easypost_key", rf"EZ[AT]K[A-Za-z0-9]{{54}}{_END}", "ezak eztk"),
    ("elevenlabs_key", rf"sk_[0-9a-f]{{48}}{_END}", "sk_"),
    ("facebook_token", r"EAA[A-Za-z0-9]{40,512}+", "eaa"),
    ("firecrawl_key", rf"fc-[0-9a-f]{{32}}{_END}", "fc-"),
    ("fireworks_key", rf"fw_[A-Za-z0-9]{{22,32}}{_END}", "fw_"),
    ("flutterwave_key", r"FLWSECK(?:_TEST)?-[0-9a-f]{12,40}+-X", "flwseck"),
    ("frameio_token", rf"fio-u-{_B64U}{{64}}", "fio-u-"),
    ("hubspot_token", rf"pat-(?:na|eu|ap)\d-{_UUID}", "pat-"),
    ("infracost_key", rf"ico-[A-Za-z0-9]{{32}}{_END}", "ico-"),
    ("lob_key", rf"(?:live|test)_[0-9a-f]{{35}}{_END}", "live_ test_"),
    ("mapbox_token", rf"sk\.eyJ{_B64U}{{20,200}}+\.{_B64U}{{20,40}}+", "sk.eyj"),
    ("neon_key", r"napi_[A-Za-z0-9]{48,80}+", "napi_"),
    ("nvidia_key", rf"nvapi-{_B64U}{{40,128}}+", "nvapi-"),
    ("plaid_token", rf"(?:access|public)-(?:sandbox|development|production)-{_UUID}", "access- public-"),
    ("posthog_key", r"ph[xr]_[A-Za-z0-9]{40,64}+", "phx_ phr_"),
    ("prefect_key", rf"pn[ub]_[A-Za-z0-9]{{36}}{_END}", "pnu_ pnb_"),
    ("pulumi_token", rf"pul-[0-9a-f]{{40}}{_END}", "pul-"),
    ("readme_key", r"rdme_[a-z0-9]{70}", "rdme_"),
    ("resend_key", rf"re_[A-Za-z0-9]{{8}}_[A-Za-z0-9]{{24}}{_END}", "re_"),
    ("shippo_token", r"shippo_(?:live|test)_[0-9a-f]{40}", "shippo_"),
    ("sonar_token", rf"sq[pua]_[0-9a-f]{{40}}{_END}", "sqp_ squ_ sqa_"),
    ("square_token", rf"sq0[a-z]{{3}}-{_B64U}{{22,64}}+", "sq0"),
    ("tavily_key", r"tvly-(?:dev-|prod-)?[A-Za-z0-9_-]{28,64}+", "tvly-"),
    ("telnyx_key", rf"KEY0[0-9A-F]{{31}}_{_B64U}{{20,32}}+", "key0"),
    ("typeform_token", rf"tfp_{_B64U}{{40,80}}+", "tfp_"),
    ("vercel_token", r"vc[pioakr]_[A-Za-z0-9]{24,80}+", "vcp_ vci_ vco_ vca_ vck_ vcr_"),
    ("voyage_key", rf"pa-{_B64U}{{43}}(?!{_B64U})", "pa-"),
    ("yandex_key", rf"AQVN{_B64U}{{34,40}}+", "aqvn"),
    ("zuplo_key", r"zpka_[A-Za-z0-9]{32}_[0-9a-f]{8}", "zpka_"),
)
