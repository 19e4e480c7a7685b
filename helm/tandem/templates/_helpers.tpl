{{- define "tandem.name" -}}
{{- printf "%s" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "tandem.selectorLabels" . }}
{{- end }}

{{- define "tandem.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "tandem.name" .) -}}
{{- end }}

{{- define "tandem.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{/* Flags of `tandem serve`, one per line: every setting under its own name. */}}
{{- define "tandem.flags" -}}
{{- range $component := list .Values.engine .Values.transfer .Values.tiers .Values.router .Values.cluster }}
{{- range $field, $value := $component }}
{{- $flag := replace "_" "-" $field }}
{{- if eq $field "engine_kind" }}
--engine={{ $value }}
{{- else if kindIs "bool" $value }}
{{ ternary (print "--" $flag) (print "--no-" $flag) $value }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
'--{{ $flag }}={{ replace "'" "'\\''" . }}'
{{- end }}
{{- else if kindIs "float64" $value }}
--{{ $flag }}={{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else if regexMatch "^[A-Za-z0-9_./:=@~+-]*$" (toString $value) }}
--{{ $flag }}={{ $value }}
{{- else }}
'--{{ $flag }}={{ replace "'" "'\\''" $value }}'
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Seconds in which answers may end after SIGTERM: what the pod has, without the delay before and 10 s to stop Ray. */}}
{{- define "tandem.shutdownGrace" -}}
{{- $delay := .Values.router.shutdown_delay_s | default 0 | float64 | ceil | int -}}
{{- max 0 (sub (sub (int .Values.terminationGracePeriodSeconds) $delay) 10) -}}
{{- end }}

{{/* Cores that a pod of one worker offers to Ray. */}}
{{- define "tandem.coresOfPod" -}}
{{- ceil .Values.cluster.num_cpus_per_worker | int -}}
{{- end }}

{{/* Worker pods of a RayCluster: those at the start, and the fewest later. */}}
{{- define "tandem.startedWorkerPods" -}}
{{- add (int .Values.cluster.num_prefill) (int .Values.cluster.num_decode) -}}
{{- end }}

{{- define "tandem.minWorkerPods" -}}
{{- int .Values.cluster.min_workers | default (include "tandem.startedWorkerPods" . | int) -}}
{{- end }}

{{- define "tandem.scheme" -}}
{{- ternary "https" "http" (or .Values.tls.existingSecret .Values.router.tls_cert | not | not) -}}
{{- end }}

{{/* Largest body, as nginx writes it. */}}
{{- define "tandem.maxBody" -}}
{{- with .Values.router.max_body_bytes }}{{ int64 . }}{{ else }}8m{{ end }}
{{- end }}

{{/* With `tandem.containerSecurityContext` this is the Restricted profile of Kubernetes' Pod Security Standards, and more. */}}
{{- define "tandem.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tandem.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tandem.rayTokenSecret" -}}
{{- .Values.rayToken.existingSecret | default (printf "%s-ray-token" (include "tandem.name" .)) -}}
{{- end }}

{{- define "tandem.kvKeySecret" -}}
{{- .Values.kvKey.existingSecret | default (printf "%s-kv-key" (include "tandem.name" .)) -}}
{{- end }}

{{/* A Secret with random text that the chart makes. An existing one stays as it is: the pods of a release must agree on it
     while they are replaced one by one. Arguments: root, name of the Secret, its key. */}}
{{- define "tandem.madeSecret" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $key := index . 2 }}
{{- $present := (lookup "v1" "Secret" $root.Release.Namespace $name).data | default dict }}
apiVersion: v1
kind: Secret
metadata:
  name: {{ $name }}
  labels:
    {{- include "tandem.labels" $root | nindent 4 }}
type: Opaque
data:
  {{ $key }}: {{ get $present $key | default (randAlphaNum 64 | b64enc) }}
{{- end }}

{{/* A pod may write to /tmp (Ray's session), the home folder (caches), the models (and compiled kernels) and /dev/shm. */}}
{{- define "tandem.volumes" -}}
- name: scripts
  configMap:
    name: {{ include "tandem.name" . }}
- name: ray-token
  secret:
    secretName: {{ include "tandem.rayTokenSecret" . }}
    defaultMode: 0440 # readable by root and the pod's group
    items:
      - key: {{ .Values.rayToken.key }}
        path: token
- name: kv-key
  secret:
    secretName: {{ include "tandem.kvKeySecret" . }}
    defaultMode: 0440
    items:
      - key: {{ .Values.kvKey.key }}
        path: key
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.worker.shmSize }}
- name: models
  {{- if .Values.modelCache.persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ .Values.modelCache.persistence.existingClaim | default (printf "%s-models" (include "tandem.name" .)) }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.modelCache.sizeLimit }}
  {{- end }}
{{- end }}

{{- define "tandem.volumeMounts" -}}
- name: scripts
  mountPath: /etc/tandem
  readOnly: true
- name: ray-token
  mountPath: /etc/tandem-ray
  readOnly: true
- name: kv-key
  mountPath: /etc/tandem-kv
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/tandem
- name: shm
  mountPath: /dev/shm
- name: models
  mountPath: {{ .Values.modelCache.path }}
{{- end }}

{{- define "tandem.environment" -}}
env:
  - name: TANDEM_CACHE
    value: {{ .Values.modelCache.path }}
  - name: HF_HOME
    value: {{ .Values.modelCache.path }}/hub
  - name: HOME
    value: /home/tandem
  - name: RAY_AUTH_MODE
    value: token
  - name: RAY_AUTH_TOKEN_PATH
    value: /etc/tandem-ray/token
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
{{- with .Values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tandem.servedName" -}}
{{- $builtIn := ternary "SmolLM2-135M-Instruct" .Values.engine.model (eq .Values.engine.model "smollm2-135m") -}}
{{- .Values.engine.served_model_name | default $builtIn -}}
{{- end }}
