"""Secrets of every kind, made up from a seed, and harmless things that look like them.

No real-looking secret is written in this file: each is put together when asked for, so that scanners of this tree have
nothing to find.
"""

from __future__ import annotations

import base64
import json
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

ALNUM = string.ascii_letters + string.digits
WORD = ALNUM + "_-"
UPPER = string.ascii_uppercase + string.digits
HEX = "0123456789abcdef"

Maker = Callable[[Random], str]


@dataclass(frozen=True)
class Planted:
    """A secret and a text that holds it. `parts` are what must not be found: its lines, if it has several."""

    kind: str
    secret: str
    text: str

    @property
    def parts(self) -> list[str]:
        return [line for line in self.secret.splitlines() if len(line) >= 6 and "-----" not in line]


def _run(random: Random, alphabet: str, length: int) -> str:
    """At least one digit, one lower and one upper case letter where the alphabet has them."""
    while True:
        found = "".join(random.choices(alphabet, k=length))
        wanted = [kind for kind in (str.isdigit, str.islower, str.isupper) if any(map(kind, alphabet))]
        if length < 8 or all(any(map(kind, found)) for kind in wanted):
            return found


def _after(prefix: str, alphabet: str, length: int, suffix: str = "") -> Maker:
    return lambda random: prefix + _run(random, alphabet, length) + suffix


def _b64url(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


def _jwt(random: Random) -> str:
    body = {"sub": _run(random, HEX, 12), "iat": random.randrange(10**9)}
    return f"{_b64url({'alg': 'HS256'})}.{_b64url(body)}.{_run(random, WORD, 43)}"


def _pem(label: str) -> Maker:
    def make(random: Random) -> str:
        lines = "\n".join(_run(random, ALNUM + "+/", 64) for _ in range(random.randint(3, 12)))
        return f"-----BEGIN {label}-----\n{lines}\n{_run(random, ALNUM, 20)}==\n-----END {label}-----"

    return make


def _discord(random: Random) -> str:
    number = base64.b64encode(str(random.randrange(10**17, 10**18)).encode()).decode().rstrip("=")
    return f"{number}.{_run(random, WORD, 6)}.{_run(random, WORD, 38)}"


def _password(random: Random) -> str:
    return _run(random, ALNUM + "!*+^~", random.randint(10, 20))


BY_SHAPE: dict[str, Maker] = {
    "jwt": _jwt,
    "github_classic": _after("ghp" + "_", ALNUM, 36),
    "github_app": _after("ghs" + "_", ALNUM, 36),
    "github_fine_grained": lambda r: "github" + f"_pat_{_run(r, ALNUM, 22)}_{_run(r, ALNUM, 59)}",
    "slack_bot": lambda r: "xoxb" + f"-{r.randrange(10**11)}-{r.randrange(10**12)}-{_run(r, ALNUM, 24)}",
    "slack_app": lambda r: "xapp" + f"-1-A{_run(r, UPPER, 10)}-{r.randrange(10**12)}-{_run(r, HEX, 64)}",
    "aws_key_id": _after("AK" + "IA", UPPER, 16),
    "gitlab": _after("glpat" + "-", WORD.strip("-"), 20),
    "gitlab_letters": _after("glpat" + "-", string.ascii_letters, 20),
    "gitlab_runner": _after("glrt" + "-", string.ascii_letters + "_", 20),
    "atlassian": lambda r: "AT" + f"ATT3xFfGF0{_run(r, ALNUM, 170)}-{_run(r, ALNUM, 9)}={_run(r, HEX.upper(), 8)}",
    "figma": lambda r: "fig" + f"d_{_run(r, ALNUM, 30)}-{_run(r, ALNUM, 9)}",
    "huggingface": _after("hf" + "_", string.ascii_letters, 34),
    "google_api": _after("AI" + "za", WORD, 35),
    "google_oauth": _after("ya29" + ".", WORD, 120),
    "google_client_secret": _after("GOCSPX" + "-", ALNUM, 28),
    "npm": _after("npm" + "_", ALNUM, 36),
    "pypi": _after("pypi" + "-AgEIcHlwaS5vcmc", WORD, 120),
    "openai_classic": _after("sk" + "-", ALNUM, 48),
    "openai_project": _after("sk" + "-proj-", WORD, 120),
    "anthropic": _after("sk" + "-ant-api03-", WORD, 93, "AA"),
    "stripe": _after("sk" + "_live_", ALNUM, 24),
    "stripe_webhook": _after("wh" + "sec_", ALNUM, 32),
    "twilio": _after("S" + "K", HEX, 32),
    "sendgrid": lambda r: "S" + f"G.{_run(r, WORD, 22)}.{_run(r, WORD, 43)}",
    "azure_client": lambda r: f"{_run(r, ALNUM, 3)}8Q" + f"~{_run(r, ALNUM + '_.~-', 34)}",
    "digitalocean": _after("dop" + "_v1_", HEX, 64),
    "telegram": lambda r: f"{r.randrange(10**8, 10**10)}:A" + f"A{_run(r, WORD, 33)}",
    "discord": _discord,
    "heroku": _after("HRKU" + "-AA", WORD, 58),
    "age": _after("AGE" + "-SECRET-KEY-1", UPPER, 58),
    "databricks": _after("da" + "pi", HEX, 32),
    "vault": _after("hvs" + ".", WORD, 90),
    "shopify": _after("shp" + "at_", HEX, 32),
    "docker": _after("dckr" + "_pat_", WORD, 27),
    "linear": _after("lin" + "_api_", ALNUM, 40),
    "new_relic": _after("NR" + "AK-", UPPER, 27),
    "grafana": lambda r: "gls" + f"a_{_run(r, ALNUM, 32)}_{_run(r, HEX, 8)}",
    "rubygems": _after("rubygems" + "_", HEX, 48),
    "groq": _after("gsk" + "_", ALNUM, 52),
    "mulligan": _after("mlg" + "_", WORD, 43),
    "rsa_key": _pem("RSA PRIVATE" + " KEY"),
    "pkcs8_key": _pem("PRIVATE" + " KEY"),
    "ssh_key": _pem("OPENSSH PRIVATE" + " KEY"),
    "airtable": lambda r: "pa" + f"t{_run(r, ALNUM, 14)}.{_run(r, HEX, 64)}",
    "alibaba": _after("LT" + "AI5t", ALNUM, 18),
    "brevo": lambda r: "xkey" + f"sib-{_run(r, HEX, 64)}-{_run(r, ALNUM, 16)}",
    "buildkite": _after("bk" + "ua_", HEX, 40),
    "contentful": _after("CF" + "PAT-", WORD, 43),
    "dynatrace": lambda r: "dt0" + f"c01.{_run(r, UPPER, 24)}.{_run(r, UPPER, 64)}",
    "easypost": _after("EZ" + "AK", ALNUM, 54),
    "elevenlabs": _after("sk" + "_", HEX, 48),
    "facebook": _after("EA" + "ACEdEose0cBA", ALNUM, 100),
    "fireworks": _after("fw" + "_", ALNUM, 24),
    "hubspot": lambda r: "pat" + f"-na1-{uuid.UUID(int=r.getrandbits(128), version=4)}",
    "mapbox": lambda r: "s" + f"k.{_b64url({'u': 'acme', 'a': _run(r, HEX, 24)})}.{_run(r, WORD, 22)}",
    "nvidia": _after("nv" + "api-", WORD, 64),
    "plaid": lambda r: "access" + f"-production-{uuid.UUID(int=r.getrandbits(128), version=4)}",
    "pulumi": _after("pu" + "l-", HEX, 40),
    "resend": lambda r: "r" + f"e_{_run(r, ALNUM, 8)}_{_run(r, ALNUM, 24)}",
    "square": _after("sq0" + "atp-", WORD, 22),
    "vercel": _after("vc" + "p_", ALNUM, 56),
    "yandex": _after("AQ" + "VN", WORD, 38),
    "pgp_key": _pem("PGP PRIVATE" + " KEY BLOCK"),
}

IN_CONTEXT: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "aws_secret": (
        _after("", ALNUM + "/+", 40),
        ("AWS_SECRET_ACCESS_KEY={}", 'aws_secret_access_key = "{}"', '{{"SecretAccessKey": "{}"}}', "secret_key: {}"),
    ),
    "twilio_auth": (_after("", HEX, 32), ("TWILIO_AUTH_TOKEN={}", "auth_token: {}", '{{"authToken": "{}"}}')),
    "heroku_uuid": (lambda r: str(uuid.UUID(int=r.getrandbits(128), version=4)), ("HEROKU_API_KEY={}", "api-key: {}")),
    "slack_webhook": (
        lambda r: f"T{_run(r, UPPER, 8)}/B{_run(r, UPPER, 8)}/{_run(r, ALNUM, 24)}",
        ("curl -X POST https://hooks.slack.com/services/{}", "webhook: https://hooks.slack.com/services/{}"),
    ),
    "discord_webhook": (
        lambda r: f"{r.randrange(10**18)}/{_run(r, WORD, 68)}",
        ("https://discord.com/api/webhooks/{}", "POST https://discordapp.com/api/webhooks/{} 204"),
    ),
    "database_url": (
        _password,
        ("DATABASE_URL=postgres://app:{}@db.example.com:5432/app", "mongodb+srv://root:{}@cluster0.example.net/x"),
    ),
    "url_userinfo": (_password, ("git clone https://ci:{}@git.example.com/a/b.git", "https://bot:{}@example.com/feed")),
    "url_query": (
        _after("", ALNUM, 24),
        ("GET https://api.example.com/v1?access_token={}&page=2", "https://x.example.com/cb?state=a&client_secret={}"),
    ),
    "signed_url": (_after("", HEX, 64), ("https://b.s3.amazonaws.com/k?X-Amz-Expires=900&X-Amz-Signature={}",)),
    "bearer": (_after("", ALNUM + "._-", 40), ("Authorization: Bearer {}", "-H 'authorization: bearer {}'")),
    "basic": (
        lambda r: base64.b64encode(f"user:{_password(r)}".encode()).decode().rstrip("="),
        ("Authorization: Basic {}", "header Basic {} was sent"),
    ),
    "cookie": (_after("", ALNUM, 32), ("Cookie: theme=dark; session={}", "set-cookie: sid={}; HttpOnly; Path=/")),
    "password": (
        _password,
        ("password={}", 'DB_PASSWORD: "{}"', '"password": "{}"', "--password {} --verbose", "PGPASSWORD={} psql"),
    ),
    "azure_account": (
        lambda r: _run(r, ALNUM + "+/", 86) + "==",
        ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=core.windows.net",),
    ),
    "netrc": (_password, ("machine api.example.com login ci password {}",)),
    "xml": (_password, ("<server><password>{}</password></server>",)),
    "curl_user": (_password, ("curl -s -u deploy:{} https://example.com/x",)),
    "teams_webhook": (
        lambda r: f"{uuid.UUID(int=r.getrandbits(128), version=4)}/IncomingWebhook/{_run(r, HEX, 32)}",
        ("https://acme.webhook.office.com/webhookb2/{}", '"url": "https://a.webhook.office.com/webhookb2/{}"'),
    ),
    "command_password": (
        _after("", ALNUM, 14),
        (
            "mysql -uroot -p{} shop",
            "sshpass -p '{}' ssh deploy@example.com",
            "docker login -u ci -p {} ghcr.io",
            "redis-cli -h cache -a {} ping",
            "openssl rsa -in key.pem -passin pass:{}",
        ),
    ),
    "sql_password": (_password, ("ALTER USER app WITH PASSWORD '{}';", "CREATE USER a IDENTIFIED BY '{}';")),
    "typed": (
        _after("", ALNUM, 30),
        ('const apiKey: string = "{}"', "let api_key: &str = '{}';", 'val apiKey: String = "{}"'),
    ),
    "spoken": (_after("", ALNUM, 12), ("the password is {} on staging", "my api key is: {}", "its token was `{}`")),
    "digest": (_after("", HEX, 32), ('Authorization: Digest username="bob", realm="r", response="{}"',)),
    "npmrc": (
        lambda r: base64.b64encode(f"ci:{_password(r)}".encode()).decode().rstrip("="),
        ("_auth={}", "//registry.example.com/:_auth = {}"),
    ),
    "seed_phrase": (
        lambda r: " ".join(_run(r, string.ascii_lowercase, r.randint(3, 7)) for _ in range(12)),
        ("mnemonic: {}", 'SEED_PHRASE="{}"'),
    ),
}

PLAIN = ("{}", "the key is {} as agreed", "try {}, please", "export TOKEN='{}'", "x={}\ny=1\n", "- {}\n- other", "({})")


def secrets(seed: int, each: int = 6) -> Iterator[Planted]:
    """`each` secrets of every kind, in texts that are drawn from the same seed."""
    random = Random(seed)
    for kind, make in BY_SHAPE.items():
        for _ in range(each):
            secret = make(random)
            yield Planted(kind, secret, random.choice(PLAIN).format(secret))
    for kind, (make, texts) in IN_CONTEXT.items():
        for _ in range(each):
            secret = make(random)
            yield Planted(kind, secret, random.choice(texts).format(secret))


def _identifier(random: Random) -> str:
    words = [
        "get",
        "user",
        "session",
        "token",
        "secret",
        "password",
        "factory",
        "manager",
        "handler",
        "provider",
        "request",
        "response",
        "key",
        "cache",
    ]
    chosen = random.choices(words, k=random.randint(3, 7))
    camel = chosen[0] + "".join(word.title() for word in chosen[1:])
    return random.choice([camel, "_".join(chosen), "-".join(chosen), "_".join(chosen).upper()])


def _image(random: Random) -> str:
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + random.randbytes(400)).decode()


def _sri(random: Random) -> str:
    return '"integrity": "sha512-' + base64.b64encode(random.randbytes(64)).decode() + '"'


def _public_key(random: Random) -> str:
    body = "\n".join(base64.b64encode(random.randbytes(48)).decode() for _ in range(4))
    return f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----"


HARMLESS: dict[str, Maker] = {
    "md5": lambda r: f"{_run(r, HEX, 32)}  dist/a.tar.gz",
    "git_sha": lambda r: f"commit {_run(r, HEX, 40)}",
    "short_sha": lambda r: f"{_run(r, HEX, 7)} fix: the parser keeps its key order",
    "sha256": lambda r: f"sha256:{_run(r, HEX, 64)}",
    "sha256_plain": lambda r: _run(r, HEX, 64),
    "uuid": lambda r: str(uuid.UUID(int=r.getrandbits(128), version=4)),
    "uuid_url": lambda r: f"https://example.com/items/{uuid.UUID(int=r.getrandbits(128), version=4)}?page=2",
    "image": _image,
    "integrity": _sri,
    "yarn": lambda r: f"  checksum: 10c0/{_run(r, HEX, 128)}",
    "go_sum": lambda r: f"golang.org/x/net v0.30.0 h1:{base64.b64encode(r.randbytes(32)).decode()}",
    "poetry": lambda r: '{file = "a-1.0-py3-none-any.whl", hash = "sha256:' + _run(r, HEX, 64) + '"}',
    "docker": lambda r: f"ghcr.io/org/image@sha256:{_run(r, HEX, 64)}",
    "bundle_name": lambda r: f"assets/index-{_run(r, WORD.strip('-'), 8)}.js",
    "identifier": _identifier,
    "pod": lambda r: f"pod/web-{_run(r, HEX, 10)}-{_run(r, string.ascii_lowercase, 5)}",
    "etag": lambda r: f'etag: W/"{_run(r, HEX, 32)}"',
    "ulid": lambda r: _run(r, UPPER, 26),
    "base64_json": lambda r: "cursor=" + _b64url({"page": r.randrange(99), "after": _run(r, HEX, 24)}),
    "ssh_public": lambda r: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA" + _run(r, ALNUM, 44) + " a@b",
    "fingerprint": lambda r: "SHA256:" + base64.b64encode(r.randbytes(32)).decode().rstrip("="),
    "certificate": _public_key,
    "css": lambda r: f".task-list__item--{_run(r, string.ascii_lowercase, 12)} .sk-circle-fade-dot {{}}",
    "usage": lambda r: f'{{"max_tokens": {r.randrange(9999)}, "token_count": {r.randrange(9999)}}}',
    "signature": lambda r: "def login(user: str, password: str, token: str | None = None) -> Session:",
    "code": lambda r: f"token = tokens[{r.randrange(9)}]; secret = os.environ['NAME']; key = cache_key(path)",
    "arn": lambda r: f"arn:aws:iam::{r.randrange(10**11, 10**12)}:role/service-role/deploy",
    "url": lambda r: f"https://cdn.example.com/npm/pkg@{r.randrange(9)}.2.{r.randrange(99)}/dist/index.min.js",
    "time": lambda r: f"2025-11-{r.randrange(10, 29)}T10:{r.randrange(10, 59)}:00.{r.randrange(10**6):06}Z",
    "branch": lambda r: f"git switch fc-{r.randrange(9999)}-pa-{_run(r, string.ascii_lowercase, 9)}",
    "spoken": lambda r: f"the token is {r.choice(['missing', 'invalid', 'refreshed'])} and the password was not sent",
    "typed": lambda r: f"const apiKey: string = process.env.KEY_{r.randrange(9)} ?? ''",
    "snake": lambda r: f"live_session_{_identifier(r)} test_{_identifier(r)} re_{_identifier(r)}",
    "module": lambda r: f"import {{ it }} from './global-{_identifier(r)}'; // glimpse-{_identifier(r)}",
    "minified": lambda r: f"!function(e,t){{var n={_run(r, ALNUM, 3)};return e.exports={_run(r, ALNUM, 2)}}}(this);",
}


def look_alikes(seed: int, each: int = 20) -> Iterator[tuple[str, str]]:
    """Kind and text."""
    random = Random(seed)
    for kind, make in HARMLESS.items():
        for _ in range(each):
            yield kind, make(random)
